"""Choosing seats for all units within one allocation; what cannot win is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, chain
from math import prod

import numpy as np

from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.held import Held, Parts, Rooms, undominated
from hflow.compiler.planner.incumbent import BATCH, Incumbent
from hflow.compiler.planner.joints import Joints
from hflow.compiler.planner.knapsack import left
from hflow.compiler.planner.numbers import Floats, Ints
from hflow.compiler.planner.outlook import Outlook
from hflow.compiler.planner.paces import Paces
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.unit import Unit

SPLITS = 3  # of intervals of memory, each into halves
FEW = 10_000_000  # choices of an interval that is not halved any more
LOOK = 100  # bounds that a first look costs
INTERVAL = 100  # bounds that one interval costs
FEWEST, MOST = 8, 256  # beginnings of choices that are made longer at a time: each time twice as many
TRIES = 6  # choices of one model that are priced at a time, to begin with something good


class Branch:
    """All choices of one allocation."""

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.outlook = best, bounds, Outlook(allocation, best, bounds)
        self.rooms = dict.fromkeys(self.outlook.free, (0, self.outlook.capacity))
        self.parts = Parts(self.outlook.nodes, self.outlook.on, tuple(self.rooms), bounds)
        self.priced: list[float] = []  # bounds of what was priced, and of all that it beats
        self._taken: Chosen | None = None  # by `dive`
        self._parts: list[list[Chosen]] | None = None  # by `descend`
        self._searched = False
        self._offered: set[frozenset[int]] = set()

    def bound_s(self, paces: Paces) -> float:
        """No choice takes less: whatever the others do, the units of each model keep one of its paces."""
        self.best.effort += LOOK
        outlook = self.outlook
        found = [paces.of(units, outlook.places, outlook.with_seat) for units in outlook.models()]
        if not all(found):
            return float("inf")
        every = list(chain(*found))
        times = [{**outlook.times, **pace.times} for pace in every]
        bounds_s = outlook.steps_s(times, [pace.moves for pace in every])
        return max(float(of_model.min()) for of_model in _parted(bounds_s, found))

    def raised_s(self) -> float:
        """What no choice takes less than, after another effort: infinite where none can be better than the
        best, 0 where the budget is spent before.

        First the choices that no other beats are tried: what they are bounded by bounds all. That leaves
        little, so that the others, which are many more, are tried only when they are asked for.
        """
        if self.best.late:
            return 0.0
        bundles = self._below(self.descend())
        if all(bundles) and self._searched:
            self._try_all(bundles)
            self.priced.clear()
        elif all(bundles):
            self._search(self.rooms, bundles, SPLITS)
        self._searched = True
        left = (bound_s for bound_s in self.priced if bound_s < self.best.limit_s)
        return 0.0 if self.best.late else min(left, default=float("inf"))

    def dive(self) -> Chosen | None:
        """Price, once, what always taking the seat with the least bound leads to: something good to begin
        with. None where some unit has no seat."""
        if self._taken is None and all(self.outlook.places.values()):
            self._taken = reduce(self._cheapest, self.outlook.order, Chosen())
            self.best.offer(self._taken.seats)
        return self._taken

    def _cheapest(self, chosen: Chosen, unit: Unit) -> Chosen:
        """The seat of `unit` with the least bound taken too."""
        longer = self.outlook.longer(chosen, unit)
        return longer[int(np.argmin(self.outlook.bounds_s(longer, np.inf)))]

    def descend(self) -> list[list[Chosen]]:
        """From there, once, change one model's choice after the other while a step becomes shorter: then more
        can be cut. The bundles to choose from; an empty one where no choice can be better than the best."""
        if self._parts is not None:
            return self._parts
        taken, self._parts = self.dive(), self._bundles()
        if taken is None or not all(self._parts):
            return self._parts
        parts = [next((c for c in b if c.seats.items() <= taken.seats.items()), b[0]) for b in self._parts]
        before = float("inf")
        while self.best.limit_s < before and not self.best.late:
            before = self.best.limit_s
            for number, bundle in enumerate(self._parts):
                others = reduce(Chosen.joined, (*parts[:number], *parts[number + 1 :]), Chosen())
                parts[number] = self._best_with(others, bundle) or parts[number]
        return self._parts

    def _best_with(self, others: Chosen, bundle: Sequence[Chosen]) -> Chosen | None:
        """Which of the choices with the least bounds gives a step shorter than any before."""
        bounds_s = self.outlook.bounds_s([others.joined(part) for part in bundle])
        found = None
        for number in map(int, np.argsort(bounds_s, kind="stable")[:TRIES]):
            before = self.best.limit_s
            if bounds_s[number] < before:
                self.best.offer(others.joined(bundle[number]).seats)
            if self.best.limit_s < before:
                found = bundle[number]
        return found

    def _bundles(self) -> list[list[Chosen]]:
        """For each model the choices for all its units that are, by themselves, below the limit."""
        return list(map(self._bundle, self.outlook.models()))

    def _bundle(self, units: Sequence[Unit]) -> list[Chosen]:
        choices = [Chosen()]
        for unit in units:
            longer = [c for chosen in choices for c in self.outlook.longer(chosen, unit)]
            [choices] = self._below([longer])
        return choices

    def _below(self, bundles: Sequence[Sequence[Chosen]]) -> list[list[Chosen]]:
        """The choices that may take less than the best."""
        limit_s, bounds_s = self.best.limit_s, self.outlook.bounds_s(list(chain(*bundles)))
        pairs = zip(bundles, _parted(bounds_s, bundles))
        return [[c for c, below in zip(bundle, part < limit_s) if below] for bundle, part in pairs]

    def _search(self, rooms: Rooms, bundles: Sequence[Sequence[Chosen]], splits: int) -> None:
        """Price what is made of bundles and leaves so much room, part by part where that is much."""
        self.best.effort += INTERVAL
        if self.best.late:
            return
        most = [self.outlook.capacity - low for low, _ in rooms.values()]
        found = undominated([self.parts.held(bundle, rooms) for bundle in bundles], most)
        if not all(found) or left(found, most, self.best.limit_s).least_s >= self.best.limit_s:
            return
        if not splits or prod(map(len, found)) <= FEW:
            self._price_all(found, rooms)
            return
        resource = max(rooms, key=lambda r: rooms[r][1] - rooms[r][0])
        low, high = rooms[resource]
        middle = (low + high) // 2
        kept = [[h.chosen for h in each] for each in found]
        for half in ((middle + 1, high), (low, middle)):
            self._search({**rooms, resource: half}, kept, splits - 1)

    def _try_all(self, bundles: Sequence[Sequence[Chosen]]) -> None:
        """Price whatever is made of bundles, also of parts that others beat."""
        held = [self.parts.held(bundle, self.rooms) for bundle in bundles]
        self._price_all(held, self.rooms)

    def _price_all(self, bundles: Sequence[Sequence[Held]], rooms: Rooms) -> None:
        most = [self.outlook.capacity - low for low, _ in rooms.values()]
        fewest_first = sorted(bundles, key=len)
        start = left(fewest_first, most, self.best.limit_s)
        if start.least_s < self.best.limit_s:
            joints = Joints(fewest_first, start, rooms, self.outlook.on, self.bounds)
            self._skim(joints, *joints.begun)

    def _skim(self, joints: Joints, rows: Ints, bounds_s: Floats) -> None:
        """Price all choices that begin with `rows`, the least bounds first."""
        if rows.shape[1] == len(joints.bundles):
            for row, bound_s in zip(rows, map(float, bounds_s)):
                self._price(joints.chosen(row), bound_s)
            return
        first, together = 0, FEWEST
        while first < len(rows) and not self.best.late:
            some = rows[first : first + together][bounds_s[first : first + together] < self.best.limit_s]
            if len(some):
                before = joints.bounded
                longer = joints.longer(some, self.best.limit_s)
                self.best.effort += BATCH + joints.bounded - before
                self._skim(joints, *longer)
            first, together = first + together, min(2 * together, MOST)

    def _price(self, chosen: Chosen, bound_s: float) -> None:
        seats = frozenset(map(id, chosen.seats.values()))  # parts may have been joined in another order
        if bound_s < self.best.limit_s and not self.best.late and seats not in self._offered:
            self._offered.add(seats)
            self.priced.append(bound_s)
            self.best.offer(chosen.seats)


def _parted(bounds_s: Floats, parts: Sequence[Sequence[object]]) -> list[Floats]:
    """What belongs to each of some parts, of which all together have so many members."""
    return np.split(bounds_s, list(accumulate(map(len, parts)))[:-1])
