"""Choosing assignments for all node groups within one allocation; what cannot win is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.assignment_tables import AssignmentTable, MemoryInterval, undominated
from hflow.compiler.planner.bounds.bound_context import BoundContext
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.joint_bounds import JointBounds
from hflow.compiler.planner.bounds.knapsack import knapsack_bound
from hflow.compiler.planner.bounds.model_fronts import ModelParetoFronts, promising
from hflow.compiler.planner.bounds.model_points import models_s
from hflow.compiler.planner.bounds.numbers import Floats, Ints
from hflow.compiler.planner.effort import BATCH, CHOICES, CLOSE, COMPARED, INTERVAL, JOINT, LOOK
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.partial_assignment import PartialAssignment
from hflow.compiler.planner.placements import Allocation

SPLITS = 3  # of intervals of memory, each into halves
FEW = 10_000_000  # choices of an interval that is not halved any more
TRIES = 100  # times that a dive goes back
FEWEST, MOST = 8, 1024  # beginnings of choices that are made longer at a time: each time more of them,
MORE = 4  # by this factor


class Branch:
    """All choices of one allocation."""

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.context = best, bounds, BoundContext(allocation, best, bounds)
        best.effort += LOOK
        sets = tuple(self.context.free)
        self.capacity = np.full(len(sets), self.context.capacity)
        self.interval = MemoryInterval(np.zeros_like(self.capacity), self.capacity)
        self.priced: list[float] = []  # bounds of what was priced, and of all that it beats
        self._searched, self._limit_s = False, 0.0  # the limit that all `_choices` are below
        self._offered: set[frozenset[tuple[str, Assignment]]] = set()

    def bound_s(self, fronts: ModelParetoFronts) -> float:
        """No choice takes less: whatever the others do, the node groups of each model keep one of its
        points."""
        context, models = self.context, self.context.models()
        everywhere = [(groups, context.places) for groups in models]
        some = promising(everywhere, context.times, self._unmoved_s, self.best.limit_s)
        found = list(map(fronts.of, models, some))
        self.best.effort += BATCH + sum(map(len, found)) // CHOICES
        return models_s(self.bounds, found, context.times, context.on, self.best.limit_s)

    def _unmoved_s(self, times: Mapping[str, Floats]) -> Floats:
        return self.context.steps_s(times, {})

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
            self._price_all(list(map(self.context.tables.of, parts)), self.interval)
            self.priced.clear()
        elif all(parts):
            self._search(self.interval, list(map(self.context.tables.of, parts)), SPLITS)
        self._searched = self._searched or not self.best.late
        left = (bound_s for bound_s in self.priced if bound_s < self.best.limit_s)
        return 0.0 if self.best.late else min(left, default=float("inf"))

    @memoize
    def dive(self) -> None:
        """What always taking the assignment with the least bound leads to, priced: something good to begin
        with. Nothing where that cannot be better than the best. Where memory does not suffice for the rest,
        the next assignment is taken instead, some times."""
        if all(self.context.places.values()):
            self._dive(PartialAssignment(), self.context.order, iter(range(TRIES)))

    def _dive(self, chosen: PartialAssignment, groups: Sequence[NodeGroup], tries: Iterator[int]) -> bool:
        """Whether memory sufficed for all `groups`, or something else ended it."""
        if not groups:
            self.best.offer(chosen.assignments)
            return True
        longer = self.context.longer(chosen, groups[0])
        bounds_s = self.context.bounds_s(longer)
        order = map(int, np.argsort(bounds_s, kind="stable"))
        fitting = (number for number in order if bounds_s[number] < float("inf"))
        for number in fitting:
            if bounds_s[number] >= self.best.limit_s or self._dive(longer[number], groups[1:], tries):
                return True
            if next(tries, None) is None:
                return True
        return False

    @cached_property
    def _choices(self) -> list[list[PartialAssignment]]:
        """For each model the choices for all its node groups that are, by themselves, below the limit."""
        self._limit_s = self.best.limit_s
        return list(map(self._of_model, self.context.models()))

    def _of_model(self, groups: Sequence[NodeGroup]) -> list[PartialAssignment]:
        choices = [PartialAssignment()]
        for group in groups:
            longer = [c for chosen in choices for c in self.context.longer(chosen, group)]
            [choices] = self._below([longer])
        return choices

    def _below(self, tables: Sequence[Sequence[PartialAssignment]]) -> list[list[PartialAssignment]]:
        """The choices that may take less than the best."""
        limit_s = self.best.limit_s
        bounds_s = map(self.context.bounds_s, tables)
        return [[c for c, s in zip(*each) if s < limit_s] for each in zip(tables, bounds_s)]

    def _search(self, interval: MemoryInterval, tables: Sequence[AssignmentTable], splits: int) -> None:
        """Price what is made of tables and leaves so much free memory, part by part where that is much."""
        self.best.effort += INTERVAL
        if self.best.late:
            return
        most, limit_s = self.capacity - interval.low, self.best.limit_s
        inside = [table.within(interval) for table in tables]
        if not all(inside) or knapsack_bound(inside, most, limit_s).least_s >= limit_s:
            return
        self.best.effort += sum(len(table) ** 2 for table in inside) // COMPARED
        found = undominated(inside, most, interval)
        if not splits or prod(map(len, found)) <= FEW:
            self._price_all(found, interval)
            return
        for half in interval.halves():
            self._search(half, found, splits - 1)

    def _price_all(self, tables: Sequence[AssignmentTable], interval: MemoryInterval) -> None:
        """Price whatever is made of tables, also of parts that others beat."""
        fewest_first = sorted((table.within(interval) for table in tables), key=len)
        start = knapsack_bound(fewest_first, self.capacity - interval.low, self.best.limit_s)
        if start.least_s < self.best.limit_s:
            joint = JointBounds(fewest_first, start, interval, self.context.on, self.bounds)
            self._skim(joint, *joint.start)

    def _skim(self, joint: JointBounds, rows: Ints, bounds_s: Floats) -> None:
        """Price all choices that begin with `rows`, the least bounds first."""
        if rows.shape[1] == len(joint.tables):
            for row, bound_s in zip(rows, map(float, bounds_s)):
                self._price(joint.chosen(row), bound_s)
            return
        first, together = 0, FEWEST
        while first < len(rows) and not self.best.late:
            some = rows[first : first + together][bounds_s[first : first + together] < self.best.limit_s]
            if len(some):
                before = joint.bounded
                longer = joint.longer(some, self.best.limit_s)
                self.best.effort += JOINT + CLOSE * (joint.bounded - before)
                self._skim(joint, *longer)
            first, together = first + together, min(MORE * together, MOST)

    def _price(self, chosen: PartialAssignment, bound_s: float) -> None:
        assignments = frozenset(chosen.assignments.items())  # parts may have been joined in another order
        if bound_s < self.best.limit_s and not self.best.late and assignments not in self._offered:
            self._offered.add(assignments)
            self.priced.append(bound_s)
            self.best.offer(chosen.assignments)
