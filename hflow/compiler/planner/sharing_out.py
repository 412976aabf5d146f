"""A good way to share devices out among the sets of a colocation, found without trying all.

One set after the other is given some of its numbers of devices, from few to many; the others get as many as
keep the busiest of them as short as can be, then the next. Of these allocations the one with the
least bound is kept, and changed as long as it helps that one set gives few or many devices to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, repeat

from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.effort import ALONE, GLANCE
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Colocation, Members

ROUNDS = 8  # of exchanges at the most
RATIO = 1.25  # of the numbers of devices that one set is given at first
Counts = tuple[int, ...]


class SharingOut:
    """Of the devices of one cluster."""

    def __init__(self, best: Incumbent, least: LeastTimes):
        self.best, self.least, self.space = best, least, best.space

    def allocation(self, colocation: Colocation) -> Allocation | None:
        """A good one of `colocation`; None where none was found that may be better than the best choice."""
        found = self._best(colocation, self._shares(colocation))
        if not found:
            return None
        for _ in range(ROUNDS):
            before, found = (
                found,
                self._best(colocation, [found, *self._exchanged(colocation, found)]) or found,
            )
            if found == before:
                break
        partition, spread, first = colocation
        return Allocation(partition, found, spread, first)

    def _best(self, colocation: Colocation, every: Iterable[Counts]) -> Counts | None:
        """The counts with the least bound."""
        best, least_s = None, self.best.limit_s
        for counts in every:
            bound_s = self._bound_s(colocation, counts, least_s)
            if bound_s < least_s:
                best, least_s = counts, bound_s
        return best

    def _bound_s(self, colocation: Colocation, counts: Counts, enough_s: float) -> float:
        """A bound that is not below `enough_s` may be that of the busiest set alone."""
        partition, spread, first = colocation
        self.best.effort += GLANCE
        busy_s = max(map(self.least.busy_s, partition, counts, repeat(spread)), default=0.0)
        if busy_s >= enough_s:
            return busy_s
        self.best.effort += ALONE
        return self.least.step_s(Allocation(partition, counts, spread, first))

    def _shares(self, colocation: Colocation) -> Iterator[Counts]:
        """One set with each number of devices, and the others with what is left."""
        partition, spread, _ = colocation
        for number, members in enumerate(partition):
            others = {n: each for n, each in enumerate(partition) if n != number}
            total = self._total(colocation)
            for count in _spread_out([n for n in self.space.sizes(members) if n <= total]):
                left = total - count
                counts = {number: count} | self._levelled(others, spread, left)
                if len(counts) == len(partition):
                    yield tuple(counts[n] for n in range(len(partition)))

    def _levelled(self, sets: Mapping[int, Members], spread: frozenset[str], left: int) -> dict[int, int]:
        """The busiest set with as few devices as let none take longer, and so on with the rest; not of all
        sets where that is not possible."""
        found: dict[int, int] = {}
        rest = dict(sets)
        while rest:
            seconds = self.least.shared_out_s(tuple(rest.values()), spread, left)
            fewest = {n: self.least.fewest(members, spread, seconds) for n, members in rest.items()}
            if sum(fewest.values()) > left:
                break
            busy_s = {n: self.least.busy_s(rest[n], count, spread) for n, count in fewest.items()}
            busiest = max(busy_s, key=busy_s.__getitem__)
            found[busiest] = fewest[busiest]
            left -= fewest[busiest]
            del rest[busiest]
        return found

    def _exchanged(self, colocation: Colocation, counts: Counts) -> Iterator[Counts]:
        """One set with fewer devices, or as many, and another with as many more as that leaves."""
        spare = self._total(colocation) - sum(counts)
        sizes = list(map(self.space.sizes, colocation.partition))
        for giver, taker in permutations(range(len(counts)), 2):
            for fewer in _further_and_further([n for n in sizes[giver] if n <= counts[giver]]):
                most = counts[taker] + spare + counts[giver] - fewer
                more = max(n for n in sizes[taker] if n <= most)
                changed = {giver: fewer, taker: more}
                yield tuple(changed.get(number, count) for number, count in enumerate(counts))

    def _total(self, colocation: Colocation) -> int:
        return self.space.shared_out(colocation)


def _spread_out(sizes: Sequence[int]) -> Iterator[int]:
    """Those of some rising numbers of which each is a good deal more than the one before."""
    last = 0.0
    for size in sizes:
        if size >= last * RATIO:
            yield size
            last = size


def _further_and_further(sizes: Sequence[int]) -> Iterator[int]:
    """The last of some numbers, the one before, and further ones in steps that double."""
    back = 1
    while back <= len(sizes):
        yield sizes[-back]
        back = back + 1 if back < 3 else 2 * back - 1
