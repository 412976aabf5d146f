"""Allocations by rising bounds, made only as far as the search gets (best first).

An allocation is begun with a colocation: which parts share devices, and which node groups run on all. Then
one set after the other gets its number of devices. What begins alike is bounded together; a whole one is
looked at closer, which raises its bound, before it is taken.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nsmallest
from typing import NamedTuple

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.known_places import KnownPlaces
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.memory_stairs import NEVER
from hflow.compiler.planner.bounds.model_fronts import ModelParetoFronts
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.effort import ALONE, BUSIEST, EFFORT, WITHIN
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Colocation, Partition
from hflow.compiler.planner.sharing_out import SharingOut

PATIENCE = EFFORT // 20  # after which it dives ahead
AHEAD = 20  # colocations into which it then dives


class PartialAllocation(NamedTuple):
    """Allocations of colocation `number` whose first sets have `counts`; of a whole one that was looked at,
    its `branch`. `closely`: by how many of the closer bounds they were bounded. Equal bounds: in the order of
    numbers and counts."""

    bound_s: float
    number: int
    counts: tuple[int, ...]
    closely: int = 0
    branch: Branch | None = None


class Frontier:
    """The allocations not yet taken that may be better than the best choice so far."""

    def __init__(self, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.space = best, bounds, best.space
        self.least = LeastTimes(best.space, bounds)
        self.fronts, self.promising_s = ModelParetoFronts(best), NEVER
        self.known = KnownPlaces(best, self.least, self.fronts)
        self._closer = self._step_s, self._work_s, self._moving_s
        self._colocations = list(map(self._decisive_first, self.space.colocations()))
        self._open = [
            PartialAllocation(self._busiest_s(number, ()), number, ())
            for number in range(len(self._colocations))
        ]
        heapify(self._open)
        self.sharing_out = SharingOut(best, self.least)
        self._ahead: set[int] = set()  # colocations that it has dived into, before they were taken
        self._patience = best.effort + PATIENCE

    @property
    def bound_s(self) -> float:
        """No plan that is left takes less."""
        return self._open[0].bound_s if self._open else NEVER

    def take(self) -> tuple[PartialAllocation, Branch] | None:
        """The allocation with the least bound; None where none can be better than the best, or where the
        budget is spent."""
        while self.bound_s < self.best.limit_s and not self.best.late:
            if self.best.effort > self._patience:
                self._dive_ahead()
                continue
            partial = heappop(self._open)
            if partial.branch:
                return partial, partial.branch
            partition, spread, first = self._colocations[partial.number]
            if partial.closely < len(self._closer):
                bound = self._closer[partial.closely]
                closer = partial._replace(closely=partial.closely + 1)
                self.put(closer, bound(partial.number, partial.counts))
            elif len(partial.counts) == len(partition):
                self._look(partial, Allocation(partition, partial.counts, spread, first))
            else:
                self._extend(partial, partition)
        return None

    def _decisive_first(self, colocation: Colocation) -> Colocation:
        """Its sets by how much they have to do, the most first, where their order is free: it decides who has
        which devices, which pins may name."""
        partition, spread, first = colocation
        if first is not None or any(pin.devices for pin in self.space.draft.pins):
            return colocation
        total = self.space.num_devices
        order = sorted(partition, key=lambda members: -self.least.busy_s(members, total, spread))
        return Colocation(tuple(order), spread)

    def put(self, partial: PartialAllocation, bound_s: float) -> None:
        """What was taken is not finished, but no choice of it takes less than `bound_s`."""
        raised = partial._replace(bound_s=max(partial.bound_s, bound_s))
        if raised.bound_s < self.best.limit_s:
            heappush(self._open, raised)

    def _look(self, partial: PartialAllocation, allocation: Allocation) -> None:
        branch = Branch(allocation, self.best, self.bounds)
        bound_s = branch.bound_s(self.fronts)
        self.put(partial._replace(branch=branch), bound_s)
        promises = bound_s < self.promising_s or (not self.best.choice and bound_s < NEVER)
        if promises:  # the sooner there is something good, the less is looked at
            self.promising_s = bound_s
            branch.dive()

    def _dive_ahead(self) -> None:
        """Try a good allocation in each of the colocations that come first. Where many have bounds alike, the
        best are taken late; with a good choice known sooner, less is left to look at."""
        began, least = self.best.effort, dict[int, PartialAllocation]()
        for partial in self._open:
            known = least.get(partial.number)
            if known is None or partial.bound_s < known.bound_s:
                least[partial.number] = partial
        new = (partial for partial in least.values() if partial.number not in self._ahead)
        first = [partial.number for partial in nsmallest(AHEAD, new)]
        self._ahead.update(first)
        for number in first:
            allocation = self.sharing_out.allocation(self._colocations[number])
            if allocation and not self.best.late:
                Branch(allocation, self.best, self.bounds).dive()
        self._patience = self.best.effort + max(PATIENCE, self.best.effort - began)

    def _extend(self, partial: PartialAllocation, partition: Partition) -> None:
        left = self.space.shared_out(self._colocations[partial.number]) - sum(partial.counts)
        for count in self.space.sizes(partition[len(partial.counts)]):
            if count > left:
                break
            counts = (*partial.counts, count)
            self.put(
                PartialAllocation(partial.bound_s, partial.number, counts),
                self._busiest_s(partial.number, counts),
            )

    def _busiest_s(self, number: int, counts: tuple[int, ...]) -> float:
        """What the busiest set does at least."""
        self.best.effort += BUSIEST
        partition, spread, _ = colocation = self._colocations[number]
        given = zip(partition, counts)
        busy_s = max((self.least.busy_s(members, count, spread) for members, count in given), default=0.0)
        if busy_s >= self.best.limit_s:
            return NEVER
        rest, left = partition[len(counts) :], self.space.shared_out(colocation) - sum(counts)
        return max(busy_s, self.least.shared_out_s(rest, spread, left))

    def _step_s(self, number: int, counts: tuple[int, ...]) -> float:
        """What a step takes at least, if the sets without a number have as many devices as they may have
        beside the others."""
        most = self._most(number, counts)
        if most is None:
            return NEVER
        self.best.effort += ALONE
        return self.least.step_s(most, len(counts))

    def _work_s(self, number: int, counts: tuple[int, ...]) -> float:
        """What the last set with a number does at least in its memory."""
        if not counts:
            return 0.0
        partition, spread, _ = self._colocations[number]
        before = self.least.intervals
        found_s = self.least.set_work_s(partition[len(counts) - 1], counts[-1], spread, self.best.limit_s)
        self.best.effort += WITHIN * (self.least.intervals - before)
        return found_s

    def _moving_s(self, number: int, counts: tuple[int, ...]) -> float:
        """What a step takes with the weights that move between places which are known."""
        most = self._most(number, counts)
        return self.known.step_s(most, len(counts)) if most else NEVER

    def _most(self, number: int, counts: tuple[int, ...]) -> Allocation | None:
        """With as many devices for each set without a number as it may have; None where there are too few."""
        partition, spread, first = colocation = self._colocations[number]
        fixed = len(counts)
        fewest = [self.least.fewest(m, spread, self.best.limit_s) for m in partition[fixed:]]
        spare = self.space.shared_out(colocation) - sum(counts) - sum(fewest)
        if spare < 0:
            return None
        return Allocation(partition, (*counts, *(spare + few for few in fewest)), spread, first)
