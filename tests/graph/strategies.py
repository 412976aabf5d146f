"""Random types and signatures."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from hflow.graph.signature import Port, Signature
from hflow.graph.types import RAGGED_DIMS, Dim, DType, Factor, ValueType

DTYPES: st.SearchStrategy[DType] = st.sampled_from(get_args(DType))
NAMES = st.sampled_from(["rows", "k", "prompts", "group", "heads"])
PRODUCTS = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(lambda n: Dim(tuple(map(Factor, n))))
RAGGED = st.sampled_from(RAGGED_DIMS).map(lambda n: Dim((Factor(n),), ragged=True))


@st.composite
def patterns(draw: st.DrawFn, rows: st.SearchStrategy[Dim] = PRODUCTS) -> ValueType:
    """A type with a row dim and at most one ragged dim."""
    return ValueType(draw(DTYPES), (draw(rows), *draw(st.lists(RAGGED, max_size=1))))


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    ports = st.lists(patterns(), min_size=1, max_size=4)
    tags: Any = st.sampled_from([None, None, "trained", "behaviour", "scored"])
    inputs = [Port(f"in{i}", t, draw(tags), i > 0 and draw(st.booleans())) for i, t in enumerate(draw(ports))]
    required = [p.type for p in inputs if not p.optional]
    outputs = draw(st.lists(st.sampled_from(required), min_size=1, max_size=3))
    return Signature(tuple(inputs), tuple(Port(f"out{i}", t) for i, t in enumerate(outputs)))
