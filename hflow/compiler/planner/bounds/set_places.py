"""On which sets of devices each node is, for bounds of allocations that begin alike: nodes with a set in
common wait for each other."""

from __future__ import annotations

from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation, Partition
from hflow.compiler.planner.search_space import Devices, SearchSpace
from hflow.schedule.tasks import device_classes

SetRows = tuple[Devices | None, ...]  # the devices of each set, where they are known
SetsByNode = dict[str, tuple[int, ...]]


class SetPlaces:
    """Of one search space."""

    def __init__(self, space: SearchSpace):
        self.space = space

    def of(self, allocation: Allocation, fixed: int) -> SetsByNode:
        """If the first sets, so many, have the counts of `allocation`, and the others as many devices or
        fewer."""
        partition, spread = allocation.partition, allocation.spread
        if not self.space.pinned:
            return self._free(partition, spread)
        return self._beside_pinned(partition, spread, known_rows(allocation, fixed), allocation.first)

    @memoize
    def _free(self, partition: Partition, spread: frozenset[str]) -> SetsByNode:
        number_of = {part: n for n, members in enumerate(partition) for part in members}
        found: SetsByNode = {}
        for group in self.space.groups:
            everywhere = group.name in spread
            on = range(len(partition)) if everywhere else (number_of[self.space.part_of(group)],)
            found |= dict.fromkeys((node.name for node in group.nodes), tuple(on))
        return found

    @memoize
    def _beside_pinned(
        self, partition: Partition, spread: frozenset[str], rows: SetRows, first: int | None
    ) -> SetsByNode:
        """Known places are taken apart into sets that do not overlap. A set whose devices are not known
        counts as one more: what is on all devices that it may lie on is on it too."""
        pinned, every = self.space.pinned, self.space.draft.cluster.devices
        placed = tuple(dict.fromkeys((*filter(None, rows), *pinned.values(), every)))
        classes = list(device_classes(placed).values())
        sets_of = {
            place: tuple(n for n, of in enumerate(classes) if i in of) for i, place in enumerate(placed)
        }
        unknown = tuple(len(classes) + n for n, row in enumerate(rows) if row is None)
        left = {*every[_end(rows, first) :]}
        over = {place: (*sets_of[place], *(unknown if left <= {*place} else ())) for place in placed}
        own = [sets_of[row] if row else (len(classes) + n,) for n, row in enumerate(rows)]
        number_of = {part: n for n, members in enumerate(partition) for part in members}
        found: SetsByNode = {}
        for group in self.space.groups:
            everywhere = group.name in spread or group.name in pinned
            on = (
                over[pinned.get(group.name, every)]
                if everywhere
                else own[number_of[self.space.part_of(group)]]
            )
            found |= dict.fromkeys((node.name for node in group.nodes), on)
        return found


def known_rows(allocation: Allocation, fixed: int) -> SetRows:
    """Of the first sets, so many. Where no place is better than another they follow by size: those of unknown
    size may come before smaller ones."""
    partition, counts, first = allocation.partition, allocation.counts, allocation.first
    later = max(counts[fixed:], default=0) if first is None else 0
    firsts = Allocation(partition[:fixed], counts[:fixed], first=first).firsts
    known = (tuple(range(at, at + n)) if n >= later else None for at, n in zip(firsts, counts))
    return *known, *([None] * (len(partition) - fixed))


def _end(rows: SetRows, first: int | None) -> int:
    """The first device on which a set may be that has none yet."""
    return 0 if first is None else max((row[-1] + 1 for row in rows if row), default=first)
