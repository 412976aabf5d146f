"""Choices made of one part of each bundle, many at a time: what they leave of memory, and what they take.

A row of numbers, one for each of the first bundles, is the beginning of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.bundle import Bundle, Rooms
from hflow.compiler.planner.bounds.knapsack import Left
from hflow.compiler.planner.bounds.numbers import Bools, Floats, Ints
from hflow.compiler.planner.bounds.recurrence import Places
from hflow.compiler.planner.chosen import Chosen

MOST = 8192  # choices that are bounded at a time


class Joints:
    """The choices that leave so much room."""

    def __init__(self, bundles: Sequence[Bundle], left: Left, rooms: Rooms, places: Places, bounds: Bounds):
        self.bundles, self.bounds, self.places, self.left = bundles, bounds, places, left
        self.bounded = 0
        self.low, self.high = rooms
        self.busy = [bundle.busy for bundle in bundles]
        self.least_s = [bundle.least_s.min(axis=0) for bundle in bundles]
        rest = [bundle.idle.min(axis=0) for bundle in bundles]
        most = [bundle.idle.max(axis=0) for bundle in bundles]
        zero = np.zeros_like(self.low)
        self.rest = [sum(rest[level:], zero) for level in range(len(rest) + 1)]
        self.most = [sum(most[level:], zero) for level in range(len(most) + 1)]

    @property
    def begun(self) -> tuple[Ints, Floats]:
        """The one beginning of all choices, and its bound."""
        return np.zeros((1, 0), dtype=np.int64), np.zeros(1)

    def chosen(self, row: Ints) -> Chosen:
        parts = (bundle.parts[number] for bundle, number in zip(self.bundles, map(int, row)))
        return reduce(Chosen.joined, parts, Chosen())

    def longer(self, rows: Ints, limit_s: float) -> tuple[Ints, Floats]:
        """All that begin so and have one part more, if that may take less than `limit_s`: with their bounds,
        which rise."""
        level = int(rows.shape[1])
        count = len(self.bundles[level])
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
        idle = sum((b.idle[n] for b, n in zip(self.bundles, rows.T)), np.zeros_like(self.low))
        room = self.left.most + self.low - idle
        may = ((room - self.rest[level] >= self.low) & (room - self.most[level] <= self.high)).all(axis=1)
        busy = sum((b[n] for b, n in zip(self.busy, rows.T)), np.zeros(self.low.shape))
        may &= self.left.work_s(level, idle, busy) < limit_s
        rows, room = rows[may], np.minimum(room[may] - self.rest[level], self.high)
        times, fits = self._times(rows, room)
        if not fits.all():
            rows, times = rows[fits], {name: each[fits] for name, each in times.items()}
        if not len(rows):
            return rows, np.zeros(0)
        self.bounded += len(rows)
        moves = {reader: np.full(len(rows), np.nan) for b in self.bundles for reader in b.readers}
        for bundle, numbers in zip(self.bundles, rows.T):
            moves |= zip(bundle.readers, bundle.moves[numbers].T)
        depth = 2 if level == len(self.bundles) else 1
        bounds_s = self.bounds.steps_s(times, self.places, moves, limit_s, depth)
        below = bounds_s < limit_s
        return rows[below], bounds_s[below]

    def _times(self, rows: Ints, room: Ints) -> tuple[dict[str, Floats], Bools]:
        """What the nodes take in so much room, the least where no part is chosen; and whether all fit."""
        times: dict[str, Floats] = {}
        fits = np.ones(len(rows), dtype=np.bool_)
        for bundle, numbers in zip(self.bundles, rows.T):
            seconds, enough = bundle.times_in(room, numbers)
            times |= zip(bundle.nodes, seconds.T)
            fits &= enough
        for bundle, least in zip(self.bundles[rows.shape[1] :], self.least_s[rows.shape[1] :]):
            times |= {name: np.full(len(rows), seconds) for name, seconds in zip(bundle.nodes, least)}
        return times, fits
