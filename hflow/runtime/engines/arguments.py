"""How rows meet the dims of a typed function."""

from __future__ import annotations

from hflow.graph.types import Dim, ValueType


def group_sizes(actual: ValueType, rows: Dim) -> tuple[int, ...]:
    """Sizes of all factors but the first of a signature's dim `rows`, taken from a value of type `actual`.

    The last factors of a signature's product are the last ones of the value, and the first is what remains
    of it: ``prompts*group`` splits rows of ``batch*turn*group`` into ``batch*turn`` and ``group``.
    """
    factors, count = actual.dims[0].factors, len(rows.factors) - 1
    sizes = tuple(factor.size for factor in factors[len(factors) - count :] if factor.size is not None)
    assert len(sizes) == count < len(factors), f"{actual} is no `{rows}` with sizes"
    return sizes
