"""Choices within limits of the memory that is left free: most trade memory for time only beyond them.

The room of a set of devices is what all units together leave free while no node runs. The search tries
intervals of rooms one by one. In a narrow one few choices of a bundle are left that no other beats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import NamedTuple

from hflow.compiler.planner.bounds import Bounds, Places
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.seats import Seat
from hflow.compiler.planner.unit import Ways

Rooms = Mapping[int, tuple[int, int]]  # the least and the most bytes that each set of devices leaves free
Curve = tuple[tuple[int, float], ...]  # from so much room on, a node takes so long


@dataclass(frozen=True)
class Held:
    """A choice for the units of one model, in an interval of rooms. `idle`, `busy`: bytes that stay, and the
    least seconds of work, on each set of devices. `curves`: of its nodes; `tight`: the sets on which some
    node is faster with more of the room."""

    chosen: Chosen
    idle: tuple[int, ...]
    busy: tuple[float, ...]
    curves: Mapping[str, Curve]
    tight: frozenset[int]

    def needs(self, readers: Iterable[str], scarce: Sequence[bool]) -> tuple[float, ...]:
        """What it takes at least: seconds of its nodes, of what moves to `readers`, bytes where `scarce`."""
        nodes = (each[-1][1] for each in self.curves.values())
        moves = (self.chosen.moves.get(reader, 0.0) for reader in readers)
        return (*nodes, *moves, *(size for size, counts in zip(self.idle, scarce) if counts))

    def no_slower(self, other: Held) -> bool:
        """Whether each of its nodes takes no longer, whatever the room."""
        return all(map(_no_slower, self.curves.values(), other.curves.values()))


def undominated(bundles: Sequence[Sequence[Held]], most: Sequence[int]) -> list[list[Held]]:
    """Of each bundle the choices that no other beats, if `most` bytes may stay on each set of devices. Where
    the largest choices stay within that, and no node is faster with more room, memory does not count."""
    slow = {r for bundle in bundles for h in bundle for r in h.tight}
    largest = [sum(max((h.idle[i] for h in each), default=0) for each in bundles) for i in range(len(most))]
    scarce = [i in slow or largest[i] > size for i, size in enumerate(most)]
    return [_undominated(each, scarce) for each in bundles]


def _undominated(choices: Sequence[Held], scarce: Sequence[bool]) -> list[Held]:
    """One needs no more than another only if the sum of its needs is no greater: in this order, what comes
    later beats nothing before it. The given order is kept."""
    readers = dict.fromkeys(reader for choice in choices for reader in choice.chosen.moves)
    needs = [choice.needs(readers, scarce) for choice in choices]
    kept: list[int] = []
    for number in sorted(range(len(choices)), key=lambda n: (sum(needs[n]), n)):
        mine, choice = needs[number], choices[number]
        if not any(all(map(le, needs[k], mine)) and choices[k].no_slower(choice) for k in kept):
            kept.append(number)
    return [choices[number] for number in sorted(kept)]


def curve(ways: Ways, seat: Seat, copy_bytes: int, low: int, high: int) -> Curve:
    """How long a node takes by room, of `low` to `high` bytes; empty if it never fits."""
    steps = [(max(low, w.need_bytes + copy_bytes), w.time_s + seat.option.swap_s) for w in ways.ways]
    fitting = {need: seconds for need, seconds in steps if need <= high}  # of each need the fastest
    return tuple(fitting.items())


def _no_slower(one: Curve, other: Curve) -> bool:
    starts = [need for need, _ in one]
    for need, seconds in other:
        number = bisect_right(starts, need)
        if not number or one[number - 1][1] > seconds:
            return False
    return True


class Kept(NamedTuple):
    """A unit in a seat, in an interval of rooms: the curves of its nodes, their work in a step, and whether
    some node is faster with more of the room."""

    curves: dict[str, Curve]
    work_s: float
    tight: bool


class Parts:
    """Makes what is held of the choices of one allocation.

    Args:
        nodes: of each unit. on: the sets of devices that each node is on. sets: all of them.
    """

    def __init__(self, nodes: Mapping[str, Sequence[str]], on: Places, sets: Sequence[int], bounds: Bounds):
        self.nodes, self.on, self.bounds = nodes, on, bounds
        self.numbers = {resource: number for number, resource in enumerate(sets)}
        self._known: dict[object, Kept | None] = {}

    def held(self, bundle: Sequence[Chosen], rooms: Rooms) -> list[Held]:
        """Those choices of a bundle for whose nodes there is enough room."""
        return list(filter(None, (self._held(chosen, rooms) for chosen in bundle)))

    def _held(self, chosen: Chosen, rooms: Rooms) -> Held | None:
        """None where a node has not enough room."""
        idle, busy = dict.fromkeys(self.numbers, 0), dict.fromkeys(self.numbers, 0.0)
        curves: dict[str, Curve] = {}
        tight: set[int] = set()
        for name, seat in chosen.seats.items():
            low, high = (min(rooms[r][end] for r in seat.resources) for end in (0, 1))
            kept = self._kept(name, seat, chosen.copies.get(name, 0), low, high)
            if kept is None:
                return None
            curves |= kept.curves
            if kept.tight:
                tight.update(self.numbers[r] for r in seat.resources)
            for resource in seat.resources:
                idle[resource] += seat.option.idle_bytes
                busy[resource] += kept.work_s
        for reader, seconds in chosen.moves.items():
            for resource in {*self.on[reader], *self.on[self.bounds.trainer_of[reader]]}:
                busy[resource] += seconds
        return Held(chosen, tuple(idle.values()), tuple(busy.values()), curves, frozenset(tight))

    def _kept(self, name: str, seat: Seat, copy_bytes: int, low: int, high: int) -> Kept | None:
        """What a unit does in a seat in rooms of `low` to `high` bytes; None where a node never fits."""
        key = name, id(seat), copy_bytes, low, high
        if key not in self._known:
            curves = {
                node: curve(ways, seat, copy_bytes, low, high)
                for node, ways in zip(self.nodes[name], seat.option.ways)
            }
            work_s = sum(c[-1][1] * self.bounds.rounds[node] for node, c in curves.items() if c)
            tight = any(start > low for each in curves.values() for start, _ in each)
            self._known[key] = Kept(curves, work_s, tight) if all(curves.values()) else None
        return self._known[key]
