"""HybridFlow's planner as published (arXiv:2409.19256, Algorithm 1): a baseline for ours.

For every partition of the models into sets that share devices, and every allocation of devices to the sets,
Algorithm 2 (`mapper`) finds the sizes of each model; the sum of three stages decides (`stages`). Generation
starts from the layout of training, with less tensor parallelism where that is faster. Transfers, resharding
and overlap count in none of this, but in the price of the plan that is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Partition
from hflow.compiler.planner.published.mapper import Mapper
from hflow.compiler.planner.published.placed_candidates import (
    as_assignments,
    candidates_with,
    refuse_wishes,
    unproven,
)
from hflow.compiler.planner.published.stages import stage_sum_s
from hflow.compiler.planner.search import SearchResult
from hflow.compiler.planner.search_space import SearchSpace


@dataclass(frozen=True)
class DeviceCounts:
    """A partition of the models, and how many devices each set is given."""

    partition: Partition
    counts: tuple[int, ...]


def hybridflow(space: SearchSpace) -> SearchResult:
    """The plan with the least sum of stages; the next one where the memory for that falls short. Raises HF305
    where none fits, HF309 for pins."""
    refuse_wishes(space.draft, placements=True)
    generating = [g for g in space.groups if g.role == "generate"]
    mapper = Mapper(space, candidates_with(space.draft, generating))
    priced = sorted(_priced(space, mapper), key=lambda p: p[0])
    best = Incumbent(space)
    for _, counts in priced:
        best.offer(_assignments(mapper, counts))
        if best.choice:
            break
    return unproven(best, len(priced))


def enum_alloc(sizes: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to give out all of `total` devices: to each set one of its `sizes` (ascending), to the last
    one what is left, if that is no less than the least of its own."""
    first, *others = sizes
    if not others:
        if total >= first[0]:
            yield (total,)
        return
    for count in (n for n in first if n < total):
        yield from ((count, *rest) for rest in enum_alloc(others, total - count))


def _priced(space: SearchSpace, mapper: Mapper) -> Iterator[tuple[float, DeviceCounts]]:
    for partition in space.partitions():
        sizes = list(map(mapper.sizes, partition))
        for counts in enum_alloc(sizes, space.num_devices) if all(sizes) else ():
            mapped = [found for each in zip(partition, counts) if (found := mapper.on(*each))]
            if len(mapped) == len(partition):
                yield stage_sum_s(m.times for m in mapped), DeviceCounts(partition, counts)


def _assignments(mapper: Mapper, chosen: DeviceCounts) -> dict[str, Assignment]:
    """Each set on devices in a row."""
    found = [mapper.on(*each) for each in zip(chosen.partition, chosen.counts)]
    candidates = [mapped.candidates for mapped in found if mapped]
    used = tuple(max(c.num_devices for c in each.values()) for each in candidates)
    firsts = Allocation(chosen.partition, used).firsts
    return as_assignments(
        {name: (c, first) for each, first in zip(candidates, firsts) for name, c in each.items()}
    )
