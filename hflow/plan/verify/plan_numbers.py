"""Numbers of a plan file that no plan has: not finite, negative, zero where something is counted, or so large
that sizes and times made of them are nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from hflow.plan.cluster_file import MAX_DEVICES
from hflow.plan.plan import Plan

MAX_INT = 2**63 - 1
MAX_FLOAT = 1e60
MAX_PLACE = 2**20  # lines and columns of a graph file

# Of what there is one at least, wherever a field has the name. `size` is that of a dim, or unknown (None).
_COUNTS = frozenset((
    "devices_per_host", "epochs", "ep", "ffn", "head_dim", "hidden", "hosts", "max_positions", "min_group",
    "neighbours", "nics_per_host", "num_experts", "num_heads", "num_kv_heads", "num_layers",
    "original_max_positions", "rotary_dim", "size", "times", "top_k", "unit", "vocab", "vpp",
))  # fmt: skip
_MOST = {
    **dict.fromkeys(("devices_per_host", "hosts"), MAX_DEVICES),
    **dict.fromkeys(("column", "end_column", "line"), MAX_PLACE),
    "num_layers": 100_000,
}
_SIGNED = frozenset(("gap", "init"))


def bad_numbers(plan: Plan) -> Iterator[str]:
    """The place of every such number, and the number, in words."""
    yield from _inside("", "", plan)
    if plan.cluster.num_devices > MAX_DEVICES:
        yield f"its cluster has {plan.cluster.num_devices} devices, more than {MAX_DEVICES}"


def _inside(place: str, name: str, value: Any) -> Iterator[str]:
    """`name`: of the field that holds the value, directly or in lists."""
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int | float):
        if not _is_fine(name, value):
            yield f"{place} is {_shown(value)}"
    elif is_dataclass(value):
        for field in fields(value):
            yield from _inside(f"{place}.{field.name}".lstrip("."), field.name, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            yield from _inside(f"{place}.{key}", "init", inner)  # of options, which may be negative
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast("list[Any]", value)):
            yield from _inside(f"{place}.{number}", "size" if name == "axes" else name, inner)


def _is_fine(name: str, value: int | float) -> bool:
    least = -math.inf if name in _SIGNED else int(name in _COUNTS)
    most = _MOST.get(name, MAX_INT if isinstance(value, int) else MAX_FLOAT)
    return least <= value and abs(value) <= most


def _shown(value: int | float) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return str(value)
