"""The choices for the units of one model, in arrays, within limits of the memory that is left free.

The room of a set of devices is what all units together leave free while no node runs. Most choices trade
memory for time only beyond some room: the search tries intervals of rooms one by one, and in a narrow one
few choices of a bundle are left that no other beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from hflow.compiler.candidates.node_groups import Unit
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.numbers import Bools, Floats, Ints, known
from hflow.compiler.planner.bounds.recurrence import Places
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.seats import Seat

NEVER = np.iinfo(np.int64).max
BLOCK = 256  # choices that are compared with each other at a time


class Rooms(NamedTuple):
    """The least and the most bytes that each set of devices leaves free."""

    low: Ints
    high: Ints

    def halves(self) -> tuple[Rooms, Rooms]:
        """Of the widest interval, the upper one first."""
        widest = np.arange(len(self.low)) == np.argmax(self.high - self.low)
        middle = (self.low + self.high) // 2
        upper = Rooms(np.where(widest, middle + 1, self.low), self.high)
        return upper, Rooms(self.low, np.where(widest, middle, self.high))


@dataclass(frozen=True)
class Bundle:
    """`parts`: the choices. By part: `idle`, bytes that stay on each set of devices; `moves`: seconds of the
    weights to each of `readers`, NaN where none move. `starts`, `seconds`: by step, part and node, from so
    much room on it takes so long. `runs`, `joins`: what a node, and a move, does on each set of devices, in
    runs of a step. `unbeaten`: the scarce sets for which no part beats another, if that is known."""

    parts: Sequence[Chosen]
    nodes: tuple[str, ...]
    readers: tuple[str, ...]
    idle: Ints
    starts: Ints
    seconds: Floats
    moves: Floats
    runs: Floats
    joins: Floats
    unbeaten: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def least_s(self) -> Floats:
        """By part and node, with all room that there may be."""
        return _at(self.seconds, (self.starts < NEVER).sum(axis=0) - 1)

    @property
    def busy(self) -> Floats:
        """By part and set of devices, the least seconds of work."""
        return self.least_s @ self.runs + known(self.moves) @ self.joins

    def tight(self, rooms: Rooms) -> Bools:
        """By set of devices, whether some node on it fits, or is faster, only with more than the least."""
        later = (self.starts > self._room_of_nodes(rooms.low)) & (self.starts < NEVER)
        return later.any(axis=(0, 1)) @ (self.runs > 0)

    def times_in(self, room: Ints, numbers: Ints) -> tuple[Floats, Bools]:
        """What the nodes take in parts of such `numbers`, each of which has some bytes of room on each set of
        devices; and whether all of them fit."""
        starts, free = self.starts[:, numbers], room[:, self._first_set]
        for node in self._on_several:
            free[:, node] = room[:, self.runs[node] > 0].min(axis=1)
        if len(starts) == 1:
            return self.seconds[0, numbers], (starts[0] <= free).all(axis=1)
        last = (starts <= free).sum(axis=0) - 1
        return _at(self.seconds[:, numbers], np.maximum(last, 0)), (last >= 0).all(axis=1)

    def within(self, rooms: Rooms) -> Bundle:
        """The parts for which there is enough room, with their steps in it."""
        low, high = map(self._room_of_nodes, rooms)
        fits = self.starts <= high
        if np.array_equal(fits, self.starts < NEVER) and (self.starts[0] >= low).all():
            return self
        found = self._of(np.flatnonzero(fits[0].all(axis=1)))
        first = np.maximum((found.starts <= low).sum(axis=0) - 1, 0)  # the steps before it take longer
        count = (found.starts <= high).sum(axis=0) - first
        number = np.arange(int(count.max(initial=1)))[:, None, None]
        step = np.minimum(first + number, len(self.starts) - 1)
        starts, seconds = (np.take_along_axis(each, step, axis=0) for each in (found.starts, found.seconds))
        starts = np.where(number < count, np.maximum(starts, low), NEVER)
        return replace(found, starts=starts, seconds=seconds)

    def undominated(self, scarce: Bools) -> Bundle:
        """The parts that no other beats, if memory counts on `scarce` sets of devices alone. What needs no
        more needs no more in sum, so that in this order none beats an earlier one."""
        if self.unbeaten == tuple(scarce):
            return self
        idle = self.idle[:, scarce].astype(np.float64)
        needs = np.concatenate([self.least_s, known(self.moves), idle], axis=1)
        order = np.argsort(needs.sum(axis=1), kind="stable")
        kept = order[:0]
        for first in range(0, len(order), BLOCK):
            some = order[first : first + BLOCK]
            some = some[~self._beat(needs, kept, some).any(axis=0)]
            among = np.triu(self._beat(needs, some, some), 1)
            kept = np.concatenate([kept, some[~among.any(axis=0)]])
        return replace(self._of(np.sort(kept)), unbeaten=tuple(scarce))

    def _beat(self, needs: Floats, ones: Ints, others: Ints) -> Bools:
        """For each pair, whether the one needs no more, and each of its nodes no longer in any room."""
        beat = np.ones((len(ones), len(others)), dtype=np.bool_)
        for need in needs.T:
            beat &= need[ones][:, None] <= need[others]
        rows, columns = np.nonzero(beat)
        one, other = ones[rows], others[columns]
        starts = self.starts[:, other]
        last = (self.starts[:, None, one] <= starts).sum(axis=0) - 1
        seconds = np.take_along_axis(self.seconds[:, one], np.maximum(last, 0), axis=0)
        no_longer = (starts == NEVER) | ((last >= 0) & (seconds <= self.seconds[:, other]))
        beat[rows, columns] = no_longer.all(axis=(0, 2))
        return beat

    def _room_of_nodes(self, room: Ints) -> Ints:
        """Of each node the bytes on that of its sets of devices which has the fewest."""
        return np.where(self.runs > 0, room, NEVER).min(axis=1)

    @cached_property
    def _first_set(self) -> Ints:
        return np.argmax(self.runs > 0, axis=1)

    @cached_property
    def _on_several(self) -> Ints:
        """The nodes on more sets of devices than one."""
        return np.flatnonzero((self.runs > 0).sum(axis=1) > 1)

    def _of(self, rows: Ints) -> Bundle:
        return replace(
            self,
            parts=[self.parts[row] for row in rows],
            idle=self.idle[rows],
            starts=self.starts[:, rows],
            seconds=self.seconds[:, rows],
            moves=self.moves[rows],
            unbeaten=None,
        )


def _at(each: Floats, step: Ints) -> Floats:
    return np.take_along_axis(each, step[None], axis=0)[0]


def undominated(bundles: Sequence[Bundle], most: Ints, rooms: Rooms) -> list[Bundle]:
    """Of each bundle the parts that no other beats in `rooms`, if `most` bytes may stay on a set of devices.
    Where the largest parts stay within that, and the least room is as good as more, memory does not count."""
    if not all(map(len, bundles)):
        return list(bundles)
    scarce = sum(bundle.idle.max(axis=0) for bundle in bundles) > most
    for bundle in bundles:
        scarce = scarce | bundle.tight(rooms)
    return [bundle.undominated(scarce) for bundle in bundles]


class Bundles:
    """Makes the bundles of one allocation.

    Args:
        units: all of them. on: the sets of devices that each node is on. sets: all of them. steps: the most
            ways of a node.
    """

    def __init__(self, units: Sequence[Unit], on: Places, sets: Sequence[int], steps: int, bounds: Bounds):
        self.on, self.bounds, self.sets = on, bounds, list(sets)
        self.nodes = {unit.name: [n.name for n in unit.nodes] for unit in units}
        self._tables = {unit.name: Table(unit, self.sets, steps) for unit in units}

    def of(self, parts: Sequence[Chosen]) -> Bundle:
        """Of choices for the same units, one at least."""
        nodes = tuple(name for unit in parts[0].seats for name in self.nodes[unit])
        readers = tuple(dict.fromkeys(reader for part in parts for reader in part.moves))
        runs = np.array([self._share(self.on[name], self.bounds.rounds[name]) for name in nodes])
        joins = [self._share({*self.on[r], *self.on[self.bounds.trainer_of[r]]}, 1) for r in readers]
        starts, seconds, idle = zip(*(self._tables[unit].rows(parts) for unit in parts[0].seats))
        return Bundle(
            parts,
            nodes,
            readers,
            reduce(np.add, idle),
            np.concatenate(starts, axis=2),
            np.concatenate(seconds, axis=2),
            np.array([[p.moves.get(r, np.nan) for r in readers] for p in parts]).reshape(len(parts), -1),
            runs,
            np.array(joins).reshape(len(readers), len(self.sets)),
        )

    def _share(self, on: Sequence[int] | set[int], times: int) -> list[float]:
        return [float(times) if one in on else 0.0 for one in self.sets]


class Table:
    """The seats of a unit, as far as they were asked for: curves of so many `steps`, and the bytes that stay
    on each of `sets`."""

    def __init__(self, unit: Unit, sets: Sequence[int], steps: int):
        self.unit, self.sets, self.steps = unit, sets, steps
        self._seats: dict[tuple[int, int], tuple[int, Seat]] = {}
        self._arrays: tuple[Ints, Floats, Ints] | None = None

    def rows(self, parts: Sequence[Chosen]) -> tuple[Ints, Floats, Ints]:
        """Starts and seconds, by step, part and node; and by part, the bytes that stay."""
        name = self.unit.name
        numbers = [self._number(part.seats[name], part.copies.get(name, 0)) for part in parts]
        if self._arrays is None:
            self._arrays = self._filled()
        starts, seconds, idle = self._arrays
        return starts[:, numbers], seconds[:, numbers], idle[numbers]

    def _number(self, seat: Seat, copy_bytes: int) -> int:
        found = self._seats.get((id(seat), copy_bytes))
        if found is None:
            found = self._seats[id(seat), copy_bytes] = len(self._seats), seat
            self._arrays = None
        return found[0]

    def _filled(self) -> tuple[Ints, Floats, Ints]:
        starts = np.full((self.steps, len(self._seats), len(self.unit.nodes)), NEVER, dtype=np.int64)
        seconds = np.zeros(starts.shape)
        idle = np.zeros((len(self._seats), len(self.sets)), dtype=np.int64)
        for (_, copy_bytes), (row, seat) in self._seats.items():
            idle[row] = [seat.option.idle_bytes if one in seat.resources else 0 for one in self.sets]
            for column, each in enumerate(seat.option.ways):
                starts[: len(each.ways), row, column] = [w.need_bytes + copy_bytes for w in each.ways]
                seconds[: len(each.ways), row, column] = [w.time_s + seat.option.swap_s for w in each.ways]
        return starts, seconds, idle
