"""Branch and bound over a `Space`: the plan with the shortest step, and the proof that none is shorter.

Allocations (a partition of the models, and the number of devices of each set) are taken in the order of a
lower bound of theirs. Within one, `branch` chooses seats unit by unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.branch import Branch, Incumbent
from hflow.compiler.planner.choice import Choice
from hflow.compiler.planner.least import LeastTimes
from hflow.compiler.planner.placements import Allocation, Partition, allocations
from hflow.compiler.planner.space import Space


@dataclass(frozen=True)
class Found:
    """`choice`: the best, if any fits; `bound_s`: none takes less; `explored`: choices that were priced."""

    choice: Choice | None
    bound_s: float
    explored: int

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.choice.step_s) if self.choice else 0.0


def search(space: Space, budget_s: float) -> Found:
    """The best choice, proven to be so unless `budget_s` seconds pass before."""
    best = Incumbent(space, time.monotonic() + budget_s)
    bounds = Bounds(space.draft)
    least = LeastTimes(space, bounds)
    for partition in space.partitions():  # a first good choice: each partition's most promising allocation
        if len(partition) == 1:
            everything = Allocation(partition, space.sizes(partition[0])[-1:])
            Branch(everything, best, bounds).run()
    waiting = [a for partition in space.partitions() for a in _promising(partition, space, least, best)]
    for bound_s, allocation in sorted(waiting, key=lambda a: a[0]):
        if bound_s >= best.limit_s:
            break
        if not Branch(allocation, best, bounds).run():
            return Found(best.choice, bound_s, best.explored)
    return Found(best.choice, best.choice.step_s if best.choice else 0.0, best.explored)


def exhaustive(space: Space) -> Found:
    """Price every choice of the space: slow, but without bounds that could be wrong."""
    best = Incumbent(space)
    for partition in space.partitions():
        sizes = list(map(space.sizes, partition))
        for allocation in allocations(partition, sizes, space.num_devices, lambda i, n: True):
            seats = space.seats(allocation)
            for chosen in product(*seats.values()):
                best.offer(dict(zip(seats, chosen)))
    return Found(best.choice, best.choice.step_s if best.choice else 0.0, best.explored)


def _promising(
    partition: Partition, space: Space, least: LeastTimes, best: Incumbent
) -> Iterator[tuple[float, Allocation]]:
    """The allocations of a partition whose bound is below the best step so far, with it."""
    sizes = list(map(space.sizes, partition))

    def worth(number: int, count: int) -> bool:
        return least.busy_s(partition[number], count, len(partition) > 1) < best.limit_s

    for allocation in allocations(partition, sizes, space.num_devices, worth):
        bound_s = least.step_s(allocation)
        if bound_s < best.limit_s:
            yield bound_s, allocation
