"""Where the node groups of a model are, in allocations of which some sets have no devices yet."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.bounds.set_places import known_rows
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.search_space import Devices, SearchSpace

OFFSETS = 2  # of a set in its first host; where more are possible, nothing is said
ModelPlaces = dict[str, Devices]  # by node group


def model_places(
    space: SearchSpace, groups: Sequence[NodeGroup], allocation: Allocation, fixed: int
) -> list[ModelPlaces]:
    """All ways in which `groups` may lie, but for whole hosts by which they lie later, since hosts are alike.
    Empty where too little is known.

    Args:
        fixed: so many sets have the counts of `allocation`, the others as many devices or fewer.
    """
    cluster = space.draft.cluster
    everywhere = dict.fromkeys(allocation.spread, cluster.devices) | space.pinned
    number_of = {part: n for n, members in enumerate(allocation.partition) for part in members}
    numbers = {g.name: number_of[space.part_of(g)] for g in groups if g.name not in everywhere}
    on, rows = {*numbers.values()}, known_rows(allocation, fixed)
    certain = {name: row for name, n in numbers.items() if (row := rows[n]) is not None}
    if len(certain) == len(numbers):
        return [{**everywhere, **certain}]
    if len(numbers) < len(groups) or max(on) >= fixed or cluster.more:
        return []
    partition, counts, per_host = allocation.partition, allocation.counts, cluster.devices_per_host
    firsts = Allocation(partition[:fixed], counts[:fixed]).firsts
    least = min(counts[n] for n in on)
    unknown = zip(partition[fixed:], counts[fixed:])
    before = {size for members, most in unknown for size in space.sizes(members) if least < size <= most}
    if len(on) == 1:
        before |= {count for n, count in enumerate(counts[:fixed]) if n not in on and count >= least}
        offsets = range(0, per_host, gcd(per_host, *before))
        return [dict.fromkeys(numbers, _row(at, least)) for at in offsets] if len(offsets) <= OFFSETS else []
    if any(size % per_host for size in (*before, *(firsts[n] for n in on))):
        return []
    return [{name: _row(firsts[n], counts[n]) for name, n in numbers.items()}]


def _row(first: int, count: int) -> Devices:
    return tuple(range(first, first + count))
