"""Allocations by rising bounds, made only as far as the search gets (best first).

An allocation begins with the node groups that run on all devices. Then one set of parts after the other is
chosen, with its number of devices. What begins alike is bounded together; a whole one is looked at closer,
which raises its bound, before it is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, nsmallest
from itertools import islice
from typing import NamedTuple

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.known_places import KnownPlaces
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.memory_stairs import NEVER
from hflow.compiler.planner.bounds.model_fronts import ModelParetoFronts
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.colocation_prefix import ColocationPrefix
from hflow.compiler.planner.effort import ALONE, BUSIEST, EFFORT, WITHIN
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Colocation
from hflow.compiler.planner.sharing_out import SharingOut

PATIENCE = EFFORT // 20  # after which it dives ahead
AHEAD = 20  # colocations into which it then dives: the best of as many prefixes,
TRIED = 10  # of each of which so many are compared


class PartialAllocation(NamedTuple):
    """Allocations whose first sets are those of `prefix` and have `counts`; of a whole one that was looked
    at, its `branch`. `closely`: by how many of the closer bounds they were bounded. Equal bounds: in the
    order of `number`, that of the first colocation, and of counts."""

    bound_s: float
    number: int
    counts: tuple[int, ...]
    closely: int
    prefix: ColocationPrefix
    branch: Branch | None = None


class Frontier:
    """The allocations not yet taken that may be better than the best choice so far."""

    def __init__(self, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.space = best, bounds, best.space
        self.least = LeastTimes(best.space, bounds)
        self.fronts, self.promising_s = ModelParetoFronts(best), NEVER
        self.known = KnownPlaces(best, self.least, self.fronts)
        self._closer = self._step_s, self._moving_s, self._work_s
        self._colocations = list(map(self._decisive_first, self.space.colocations()))
        self._open: list[PartialAllocation] = []
        for prefix in ColocationPrefix.shortest(self._colocations):
            self._put(prefix, (), 0.0)
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
            if partial.closely < len(self._closer):
                bound = self._closer[partial.closely]
                closer = partial._replace(closely=partial.closely + 1)
                self.put(closer, bound(partial.prefix, partial.counts))
            elif partial.prefix.whole:
                self._look(partial)
            else:
                self._extend(partial)
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

    def _put(self, prefix: ColocationPrefix, counts: tuple[int, ...], bound_s: float) -> None:
        """What begins so, if no such choice takes less than `bound_s`."""
        partial = PartialAllocation(bound_s, prefix.numbers[0], counts, 0, prefix)
        self.put(partial, self._busiest_s(prefix, counts))

    def _look(self, partial: PartialAllocation) -> None:
        partition, spread, first = partial.prefix.colocation
        allocation = Allocation(partition, partial.counts, spread, first)
        branch = Branch(allocation, self.best, self.bounds)
        bound_s = branch.bound_s(self.fronts)
        self.put(partial._replace(branch=branch), bound_s)
        promises = bound_s < self.promising_s or (not self.best.choice and bound_s < NEVER)
        if promises:  # the sooner there is something good, the less is looked at
            self.promising_s = bound_s
            branch.dive()

    def _dive_ahead(self) -> None:
        """Try a good allocation in each of some colocations, of the prefixes that come first. Where many have
        bounds alike, the best are taken late; with a good choice known sooner, less is left to look at."""
        began, least = self.best.effort, dict[tuple[int, int], PartialAllocation]()
        for partial in self._open:
            place = partial.number, len(partial.counts)
            known = least.get(place)
            if known is None or partial.bound_s < known.bound_s:
                least[place] = partial
        some = (partial for partial in sorted(least.values()) if any(True for _ in self._new(partial)))
        every = dict.fromkeys(number for partial in islice(some, AHEAD) for number in self._new(partial))
        first = nsmallest(AHEAD, every, key=lambda number: (self._colocated_s(number), number))
        self._ahead.update(first)
        for number in first:
            allocation = self.sharing_out.allocation(self._colocations[number])
            if allocation and not self.best.late:
                Branch(allocation, self.best, self.bounds).dive()
        self._patience = self.best.effort + max(PATIENCE, self.best.effort - began)

    def _new(self, partial: PartialAllocation) -> Iterable[int]:
        """Some of its colocations that were not dived into."""
        return islice((n for n in partial.prefix.numbers if n not in self._ahead), TRIED)

    def _colocated_s(self, number: int) -> float:
        """What a step takes at least in a colocation."""
        only = ColocationPrefix(self._colocations, (number,), 0)
        busiest_s = self._busiest_s(only, ())
        return busiest_s if busiest_s >= self.best.limit_s else max(busiest_s, self._step_s(only, ()))

    def _extend(self, partial: PartialAllocation) -> None:
        for members, longer in partial.prefix.longer:
            left = self._devices(longer) - sum(partial.counts)
            for count in (n for n in self.space.sizes(members) if n <= left):
                self._put(longer, (*partial.counts, count), partial.bound_s)

    def _devices(self, prefix: ColocationPrefix) -> int:
        """The most that all sets have together."""
        if prefix.ungrouped:
            return self.space.num_devices - (prefix.colocation.first or 0)
        return self.space.shared_out(prefix.colocation)

    def _busiest_s(self, prefix: ColocationPrefix, counts: tuple[int, ...]) -> float:
        """What the busiest set does at least."""
        self.best.effort += BUSIEST
        partition, spread, _ = prefix.colocation
        given = zip(partition, counts)
        busy_s = max((self.least.busy_s(members, count, spread) for members, count in given), default=0.0)
        if busy_s >= self.best.limit_s:
            return NEVER
        left = self._devices(prefix) - sum(counts)
        rest_s = self.least.ungrouped_s if prefix.ungrouped else self.least.shared_out_s
        return max(busy_s, rest_s(prefix.rest, spread, left))

    def _step_s(self, prefix: ColocationPrefix, counts: tuple[int, ...]) -> float:
        """What a step takes at least, if the sets without a number have as many devices as they may have
        beside the others."""
        most = self._most(prefix, counts)
        if most is None:
            return NEVER
        self.best.effort += ALONE
        return self.least.step_s(most, len(counts))

    def _work_s(self, prefix: ColocationPrefix, counts: tuple[int, ...]) -> float:
        """What the last set with a number does at least in its memory."""
        if not counts:
            return 0.0
        partition, spread, _ = prefix.colocation
        before = self.least.intervals
        found_s = self.least.set_work_s(partition[len(counts) - 1], counts[-1], spread, self.best.limit_s)
        self.best.effort += WITHIN * (self.least.intervals - before)
        return found_s

    def _moving_s(self, prefix: ColocationPrefix, counts: tuple[int, ...]) -> float:
        """What a step takes with the weights that move between places which are known."""
        most = self._most(prefix, counts)
        return self.known.step_s(most, len(counts), prefix.ungrouped) if most else NEVER

    def _most(self, prefix: ColocationPrefix, counts: tuple[int, ...]) -> Allocation | None:
        """With as many devices for each set without a number as it may have; None where there are too few."""
        partition, spread, first = prefix.colocation
        left = self._devices(prefix) - sum(counts)
        if prefix.ungrouped:
            return Allocation(partition, (*counts, *(left for _ in prefix.rest)), spread, first)
        fewest = [self.least.fewest(members, spread, self.best.limit_s) for members in prefix.rest]
        spare = left - sum(fewest)
        if spare < 0:
            return None
        return Allocation(partition, (*counts, *(spare + few for few in fewest)), spread, first)
