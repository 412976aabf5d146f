"""Choices made of one part of each bundle, many at a time: what they leave of memory, and what they take.

A row of numbers, one for each of the first bundles, is the beginning of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hflow.compiler.planner.bounds import Bounds, Places
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.held import Held, Rooms
from hflow.compiler.planner.knapsack import Left
from hflow.compiler.planner.numbers import Bools, Floats, Ints

MOST = 2048  # choices that are bounded at a time
NEVER_FITS = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Bundle:
    """The parts to choose from. `idle`, `busy`: bytes and seconds by part and set of devices; `starts`,
    `seconds`: the curves of `nodes`, by part, node and step; `moves`: seconds to each reader, NaN where
    nothing moves."""

    held: Sequence[Held]
    nodes: tuple[str, ...]
    idle: Ints
    busy: Floats
    starts: Ints
    seconds: Floats
    moves: Floats

    @staticmethod
    def of(held: Sequence[Held], readers: Sequence[str]) -> Bundle:
        nodes = tuple(held[0].curves)
        steps = max(len(curve) for each in held for curve in each.curves.values())
        starts = np.full((len(held), len(nodes), steps), NEVER_FITS, dtype=np.int64)
        seconds = np.zeros((len(held), len(nodes), steps))
        for row, each in enumerate(held):
            for column, curve in enumerate(each.curves.values()):
                starts[row, column, : len(curve)] = [start for start, _ in curve]
                seconds[row, column, : len(curve)] = [took for _, took in curve]
        idle = np.array([each.idle for each in held], dtype=np.int64)
        busy = np.array([each.busy for each in held])
        moves = np.array([[each.chosen.moves.get(r, np.nan) for r in readers] for each in held])
        return Bundle(held, nodes, idle, busy, starts, seconds, moves.reshape(len(held), len(readers)))

    def least_s(self) -> Floats:
        """Of each node, in any part and with all room that there may be."""
        last = (self.starts < NEVER_FITS).sum(axis=2, keepdims=True) - 1
        return np.take_along_axis(self.seconds, last, axis=2)[:, :, 0].min(axis=0)


class Joints:
    """The choices that leave so much room."""

    def __init__(
        self,
        bundles: Sequence[Sequence[Held]],
        left: Left,
        rooms: Rooms,
        places: Places,
        bounds: Bounds,
    ):
        self.bounds, self.places, self.left = bounds, places, left
        self.bounded = 0
        self.readers = tuple(dict.fromkeys(r for held in bundles for each in held for r in each.chosen.moves))
        self.bundles = [Bundle.of(held, self.readers) for held in bundles]
        self.low, self.high = (np.array([each[end] for each in rooms.values()]) for end in (0, 1))
        self.least_s = [bundle.least_s() for bundle in self.bundles]
        rest = [bundle.idle.min(axis=0) for bundle in self.bundles]
        most = [bundle.idle.max(axis=0) for bundle in self.bundles]
        zero = np.zeros_like(self.low)
        self.rest = [sum(rest[level:], zero) for level in range(len(rest) + 1)]
        self.most = [sum(most[level:], zero) for level in range(len(most) + 1)]
        numbers = {resource: number for number, resource in enumerate(rooms)}
        self.sets = {name: [numbers[r] for r in on] for name, on in places.items()}

    @property
    def begun(self) -> tuple[Ints, Floats]:
        """The one beginning of all choices, and its bound."""
        return np.zeros((1, 0), dtype=np.int64), np.zeros(1)

    def chosen(self, row: Ints) -> Chosen:
        parts = (bundle.held[number].chosen for bundle, number in zip(self.bundles, map(int, row)))
        return reduce(Chosen.joined, parts, Chosen())

    def longer(self, rows: Ints, limit_s: float) -> tuple[Ints, Floats]:
        """All that begin so and have one part more, if that may take less than `limit_s`: with their bounds,
        which rise."""
        level = int(rows.shape[1])
        count = len(self.bundles[level].held)
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
        busy = sum((b.busy[n] for b, n in zip(self.bundles, rows.T)), np.zeros(self.low.shape))
        may &= self.left.work_s(level, idle, busy) < limit_s
        rows, room = rows[may], np.minimum(room[may] - self.rest[level], self.high)
        times, fits = self._times(rows, room)
        if not fits.all():
            rows, times = rows[fits], {name: each[fits] for name, each in times.items()}
        if not len(rows):
            return rows, np.zeros(0)
        self.bounded += len(rows)
        moves = np.full((len(rows), len(self.readers)), np.nan)
        for bundle, numbers in zip(self.bundles, rows.T):
            moves = np.fmax(moves, bundle.moves[numbers])
        moving, whole = dict(zip(self.readers, moves.T)), level == len(self.bundles)
        bounds_s = self.bounds.steps_s(times, self.places, moving, limit_s, whole)
        below = bounds_s < limit_s
        return rows[below], bounds_s[below]

    def _times(self, rows: Ints, room: Ints) -> tuple[dict[str, Floats], Bools]:
        """What the nodes take in so much room, the least where no part is chosen; and whether all fit."""
        times: dict[str, Floats] = {}
        fits = np.ones(len(rows), dtype=np.bool_)
        for bundle, numbers in zip(self.bundles, rows.T):
            for column, name in enumerate(bundle.nodes):
                free = room[:, self.sets[name]].min(axis=1, keepdims=True)
                last = (bundle.starts[numbers, column] <= free).sum(axis=1) - 1
                fits &= last >= 0
                times[name] = bundle.seconds[numbers, column, last]
        for bundle, least in zip(self.bundles[rows.shape[1] :], self.least_s[rows.shape[1] :]):
            times |= {name: np.full(len(rows), seconds) for name, seconds in zip(bundle.nodes, least)}
        return times, fits
