"""Over how many ranks rows may be cut: context parallelism, and sequence parallelism over tp.

Sequence parallelism is tried wherever there is tp: it sends as many bytes forward, keeps less, and divides
what lies between the products. Unless it is pinned, context parallelism is tried for long rows only. A row of
less than `LEAST_TOKENS` for each of two ranks fits where the weights do, and dp spreads such rows without any
message.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.pins import Pin

LEAST_TOKENS = 4096  # of the longest row, on each rank


def context_sizes(group: NodeGroup, pins: Sequence[Pin], most: int) -> list[int]:
    """Sizes of cp to try on `most` devices or fewer, 1 among them unless others are pinned."""
    pinned = {size for pin in pins for axis, size in pin.sizes if axis == "cp"}
    if pinned:
        return sorted(pinned)
    if uncut(group):
        return [1]
    largest = max(1, min(most, _longest(group) // LEAST_TOKENS))
    return [size for size in range(1, largest + 1) if most % size == 0]


def sequence_parallel_or_not(group: NodeGroup, pins: Sequence[Pin], tp: int) -> Sequence[bool]:
    """Whether to try a layout with and without sequence parallelism."""
    pinned = {pin.sp for pin in pins if pin.sp is not None}
    if pinned:
        return sorted(pinned)
    return (False, True) if tp > 1 and not uncut(group) else (False,)


def uncut(group: NodeGroup) -> str:
    """Why the engine of the group cannot cut the rows of all its nodes; empty if it can."""
    ops = {node.op for node in group.nodes} - {*group.profile.cuts_rows}
    if "generate" in ops:
        return "generation reads whole rows"
    if ops:
        return f"{group.profile.title} reads whole rows"
    return ""


def _longest(group: NodeGroup) -> int:
    return max(work.sequence for work in group.works)
