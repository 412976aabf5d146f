"""Choosing seats for all units within one allocation; what cannot win is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import accumulate, chain
from math import prod

import numpy as np

from hflow.compiler.candidates.node_groups import Unit
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.bundle import Bundle, Rooms, undominated
from hflow.compiler.planner.bounds.joints import Joints
from hflow.compiler.planner.bounds.knapsack import left
from hflow.compiler.planner.bounds.numbers import Floats, Ints
from hflow.compiler.planner.bounds.outlook import Outlook
from hflow.compiler.planner.bounds.paces import Paces
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.incumbent import BATCH, Incumbent
from hflow.compiler.planner.memoize import kept
from hflow.compiler.planner.placements import Allocation

SPLITS = 3  # of intervals of memory, each into halves
FEW = 10_000_000  # choices of an interval that is not halved any more
LOOK = 100  # bounds that a first look costs
INTERVAL = 100  # bounds that one interval costs
FEWEST, MOST = 8, 1024  # beginnings of choices that are made longer at a time: each time more of them,
MORE = 4  # by this factor
TRIES = 6  # choices of one model that are priced at a time, to begin with something good


class Branch:
    """All choices of one allocation."""

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.outlook = best, bounds, Outlook(allocation, best, bounds)
        sets = tuple(self.outlook.free)
        self.capacity = np.full(len(sets), self.outlook.capacity)
        self.rooms = Rooms(np.zeros_like(self.capacity), self.capacity)
        self.priced: list[float] = []  # bounds of what was priced, and of all that it beats
        self._searched, self._limit_s = False, 0.0  # the limit that all `_choices` are below
        self._offered: set[frozenset[int]] = set()

    def bound_s(self, paces: Paces) -> float:
        """No choice takes less: whatever the others do, the units of each model keep one of its paces."""
        self.best.effort += LOOK
        outlook = self.outlook
        found = [paces.of(units, outlook.places, outlook.renewal) for units in outlook.models()]
        if not all(found):
            return float("inf")
        every = list(chain(*found))
        times = [{**outlook.times, **pace.times} for pace in every]
        taking = {name: np.array([each[name] for each in times]) for name in self.bounds.nodes}
        readers = dict.fromkeys(reader for pace in every for reader in pace.moves)
        moving = {reader: np.array([p.moves.get(reader, np.nan) for p in every]) for reader in readers}
        bounds_s = outlook.steps_s(taking, moving)
        return max(float(of_model.min()) for of_model in _parted(bounds_s, found))

    def raised_s(self) -> float:
        """What no choice takes less than, after another effort: infinite where none can be better than the
        best, 0 where the budget is spent before.

        First the choices that no other beats are tried: what they are bounded by bounds all. That leaves
        little, so that the others, which are many more, are tried only when they are asked for.
        """
        if self.best.late:
            return 0.0
        parts = self._choices
        if self.best.limit_s < self._limit_s:
            parts = self._below(parts)
        if all(parts) and self._searched:
            self._price_all(list(map(self.outlook.bundles.of, parts)), self.rooms)
            self.priced.clear()
        elif all(parts):
            self._search(self.rooms, list(map(self.outlook.bundles.of, parts)), SPLITS)
        self._searched = True
        left = (bound_s for bound_s in self.priced if bound_s < self.best.limit_s)
        return 0.0 if self.best.late else min(left, default=float("inf"))

    @kept
    def dive(self) -> Chosen | None:
        """What always taking the seat with the least bound leads to, priced: something good to begin with.
        None where that cannot be better than the best."""
        if not all(self.outlook.places.values()):
            return None
        chosen = Chosen()
        for unit in self.outlook.order:
            longer = self.outlook.longer(chosen, unit)
            bounds_s = self.outlook.bounds_s(longer)
            chosen = longer[int(np.argmin(bounds_s))]
            if bounds_s.min() >= self.best.limit_s:
                return None
        self.best.offer(chosen.seats)
        return chosen

    def descend(self) -> None:
        """From there, change one model's choice after the other while a step becomes shorter: then more can
        be cut."""
        taken = self.dive()
        if taken is None or not all(self._choices):
            return
        parts = [next((c for c in b if c.seats.items() <= taken.seats.items()), b[0]) for b in self._choices]
        before = float("inf")
        while self.best.limit_s < before and not self.best.late:
            before = self.best.limit_s
            for number, bundle in enumerate(self._choices):
                others = reduce(Chosen.joined, (*parts[:number], *parts[number + 1 :]), Chosen())
                parts[number] = self._best_with(others, bundle) or parts[number]

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

    @cached_property
    def _choices(self) -> list[list[Chosen]]:
        """For each model the choices for all its units that are, by themselves, below the limit."""
        self._limit_s = self.best.limit_s
        return list(map(self._of_model, self.outlook.models()))

    def _of_model(self, units: Sequence[Unit]) -> list[Chosen]:
        choices = [Chosen()]
        for unit in units:
            longer = [c for chosen in choices for c in self.outlook.longer(chosen, unit)]
            [choices] = self._below([longer])
        return choices

    def _below(self, bundles: Sequence[Sequence[Chosen]]) -> list[list[Chosen]]:
        """The choices that may take less than the best."""
        limit_s = self.best.limit_s
        bounds_s = map(self.outlook.bounds_s, bundles)
        return [[c for c, s in zip(*each) if s < limit_s] for each in zip(bundles, bounds_s)]

    def _search(self, rooms: Rooms, bundles: Sequence[Bundle], splits: int) -> None:
        """Price what is made of bundles and leaves so much room, part by part where that is much."""
        self.best.effort += INTERVAL
        if self.best.late:
            return
        most, limit_s = self.capacity - rooms.low, self.best.limit_s
        inside = [bundle.within(rooms) for bundle in bundles]
        if not all(inside) or left(inside, most, limit_s).least_s >= limit_s:
            return
        found = undominated(inside, most, rooms)
        if not splits or prod(map(len, found)) <= FEW:
            self._price_all(found, rooms)
            return
        for half in rooms.halves():
            self._search(half, found, splits - 1)

    def _price_all(self, bundles: Sequence[Bundle], rooms: Rooms) -> None:
        """Price whatever is made of bundles, also of parts that others beat."""
        fewest_first = sorted((bundle.within(rooms) for bundle in bundles), key=len)
        start = left(fewest_first, self.capacity - rooms.low, self.best.limit_s)
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
            first, together = first + together, min(MORE * together, MOST)

    def _price(self, chosen: Chosen, bound_s: float) -> None:
        seats = frozenset(map(id, chosen.seats.values()))  # parts may have been joined in another order
        if bound_s < self.best.limit_s and not self.best.late and seats not in self._offered:
            self._offered.add(seats)
            self.priced.append(bound_s)
            self.best.offer(chosen.seats)


def _parted(bounds_s: Floats, parts: Sequence[Sequence[object]]) -> list[Floats]:
    """What belongs to each of some parts, of which all together have so many members."""
    return np.split(bounds_s, list(accumulate(map(len, parts)))[:-1])
