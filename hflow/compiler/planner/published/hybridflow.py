"""HybridFlow's planner as published (arXiv:2409.19256, Algorithm 1): a baseline for ours.

For every partition of the models into sets that share devices, and every allocation of devices to the sets,
Algorithm 2 (`mapper`) finds the sizes of each model; the sum of three stages decides (`stages`). Generation
starts from the layout of training, with less tensor parallelism where that is faster. Transfers, resharding
and overlap count in none of this, but in the price of the plan that is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Partition
from hflow.compiler.planner.published.mapper import Mapper
from hflow.compiler.planner.published.seating import options_with, refuse_wishes, seated, unproven
from hflow.compiler.planner.published.stages import stage_sum_s
from hflow.compiler.planner.search import Found
from hflow.compiler.planner.seats import Seat
from hflow.compiler.planner.space import Space


@dataclass(frozen=True)
class Assignment:
    """A partition of the models, and how many devices each set is given."""

    partition: Partition
    counts: tuple[int, ...]


def hybridflow(space: Space) -> Found:
    """The plan with the least sum of stages; the next one where the memory for that falls short. Raises HF305
    where none fits, HF309 for pins."""
    refuse_wishes(space.draft, placements=True)
    generating = [u for u in space.units if u.role == "generate"]
    mapper = Mapper(space, options_with(space.draft, generating))
    priced = sorted(_priced(space, mapper), key=lambda p: p[0])
    best = Incumbent(space)
    for _, assignment in priced:
        best.offer(_seats(mapper, assignment))
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


def _priced(space: Space, mapper: Mapper) -> Iterator[tuple[float, Assignment]]:
    for partition in space.partitions():
        sizes = list(map(mapper.sizes, partition))
        for counts in enum_alloc(sizes, space.num_devices) if all(sizes) else ():
            mapped = [found for each in zip(partition, counts) if (found := mapper.on(*each))]
            if len(mapped) == len(partition):
                yield stage_sum_s(m.times for m in mapped), Assignment(partition, counts)


def _seats(mapper: Mapper, assignment: Assignment) -> dict[str, Seat]:
    """Each set on devices in a row."""
    found = [mapper.on(*each) for each in zip(assignment.partition, assignment.counts)]
    options = [mapped.options for mapped in found if mapped]
    used = tuple(max(o.num_devices for o in each.values()) for each in options)
    firsts = Allocation(assignment.partition, used).firsts
    return seated({name: (o, first) for each, first in zip(options, firsts) for name, o in each.items()})
