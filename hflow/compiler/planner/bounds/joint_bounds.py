"""Choices made of one part of each table, many at a time: what they leave of memory, and what they take.

A row of numbers, one for each of the first tables, is the beginning of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from hflow.compiler.planner.bounds.assignment_tables import AssignmentTable, MemoryInterval
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.knapsack import KnapsackBound
from hflow.compiler.planner.bounds.numbers import Bools, Floats, Ints
from hflow.compiler.planner.bounds.recurrence import Places
from hflow.compiler.planner.partial_assignment import PartialAssignment

MOST = 8192  # choices that are bounded at a time


class JointBounds:
    """Builds complete choices by adding one row of each table after the other, and keeps those that leave as
    much memory as `interval` says and whose bound is below the limit. `left`: bounds the work of the tables
    that are not used yet."""

    def __init__(
        self,
        tables: Sequence[AssignmentTable],
        left: KnapsackBound,
        interval: MemoryInterval,
        places: Places,
        bounds: Bounds,
    ):
        self.tables, self.bounds, self.places, self.left = tables, bounds, places, left
        self.bounded = 0
        self.alike = [_same_base(tables[:level], table) for level, table in enumerate(tables)]
        self.low, self.high = interval
        self.busy = [table.busy for table in tables]
        self.least_s = [table.least_s.min(axis=0) for table in tables]
        rest = [table.idle.min(axis=0) for table in tables]
        most = [table.idle.max(axis=0) for table in tables]
        zero = np.zeros_like(self.low)
        self.rest = [sum(rest[level:], zero) for level in range(len(rest) + 1)]
        self.most = [sum(most[level:], zero) for level in range(len(most) + 1)]

    @property
    def start(self) -> tuple[Ints, Floats]:
        """The one beginning of all choices, and its bound."""
        return np.zeros((1, 0), dtype=np.int64), np.zeros(1)

    def chosen(self, row: Ints) -> PartialAssignment:
        parts = (table.parts[number] for table, number in zip(self.tables, map(int, row)))
        return reduce(PartialAssignment.joined, parts, PartialAssignment())

    def longer(self, rows: Ints, limit_s: float) -> tuple[Ints, Floats]:
        """All that begin so and have one part more, if that may take less than `limit_s`: with their bounds,
        which rise."""
        level = int(rows.shape[1])
        count = len(self.tables[level])
        step = max(1, MOST // count)
        found: list[tuple[Ints, Floats]] = []
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            more = np.tile(np.arange(count), len(some))
            found.append(self._bounded(np.column_stack([some.repeat(count, axis=0), more]), limit_s))
        every, bounds_s = (np.concatenate(each) for each in zip(*found))
        order = np.argsort(bounds_s, kind="stable")
        return every[order], bounds_s[order]

    def _bounded(self, rows: Ints, limit_s: float) -> tuple[Ints, Floats]:
        """Those of some choices that may take less than `limit_s`, with their bounds."""
        level = int(rows.shape[1])
        rows = self._alike(rows, level - 1)
        idle = sum((b.idle[n] for b, n in zip(self.tables, rows.T)), np.zeros_like(self.low))
        free_memory = self.left.most + self.low - idle
        enough = free_memory - self.rest[level] >= self.low
        may = (enough & (free_memory - self.most[level] <= self.high)).all(axis=1)
        busy = sum((b[n] for b, n in zip(self.busy, rows.T)), np.zeros(self.low.shape))
        may &= self.left.work_s(level, idle, busy) < limit_s
        rows, free_memory = rows[may], np.minimum(free_memory[may] - self.rest[level], self.high)
        times, fits = self._times(rows, free_memory)
        if not fits.all():
            rows, times = rows[fits], {name: each[fits] for name, each in times.items()}
        if not len(rows):
            return rows, np.zeros(0)
        self.bounded += len(rows)
        moves = {reader: np.full(len(rows), np.nan) for b in self.tables for reader in b.readers}
        for table, numbers in zip(self.tables, rows.T):
            moves |= zip(table.readers, table.moves[numbers].T)
        depth = 2 if level == len(self.tables) else 1
        bounds_s = self.bounds.steps_s(times, self.places, moves, limit_s, depth)
        below = bounds_s < limit_s
        return rows[below], bounds_s[below]

    def _alike(self, rows: Ints, last: int) -> Ints:
        """Those in which the trainer of the `last` table lies as those before with the same base."""
        before, own = self.alike[last], self.tables[last].lies
        if before is None or own is None:
            return rows
        lies = self.tables[before].lies
        assert lies is not None
        return rows[lies[rows[:, before]] == own[rows[:, last]]]

    def _times(self, rows: Ints, free_memory: Ints) -> tuple[dict[str, Floats], Bools]:
        """What the nodes take in so much free memory, the least where no part is chosen; and whether all
        fit."""
        times: dict[str, Floats] = {}
        fits = np.ones(len(rows), dtype=np.bool_)
        for table, numbers in zip(self.tables, rows.T):
            seconds, enough = table.times_in(free_memory, numbers)
            times |= zip(table.nodes, seconds.T)
            fits &= enough
        for table, least in zip(self.tables[rows.shape[1] :], self.least_s[rows.shape[1] :]):
            times |= {name: np.full(len(rows), seconds) for name, seconds in zip(table.nodes, least)}
        return times, fits


def _same_base(before: Sequence[AssignmentTable], table: AssignmentTable) -> int | None:
    """The number of a table `before` whose model shares its base with that of `table`."""
    if not table.sharing:
        return None
    return next((number for number, each in enumerate(before) if each.sharing == table.sharing), None)
