"""Choices within limits of the memory that is left free: most trade memory for time only beyond them.

The room of a set of devices is what all units together leave free while no node runs. The search tries
intervals of rooms one by one. In a narrow one few choices of a bundle are left that no other beats; and how
little time a set of devices needs, within its memory, is a small knapsack problem.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import le

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


def undominated(bundles: Sequence[Iterable[Held | None]], most: Sequence[int]) -> list[list[Held]]:
    """Of each bundle the choices that no other beats, if `most` bytes may stay on each set of devices. Where
    the largest choices stay within that, and no node is faster with more room, memory does not count."""
    found = [list(filter(None, bundle)) for bundle in bundles]
    slow = {r for each in found for h in each for r in h.tight}
    largest = [sum(max((h.idle[i] for h in each), default=0) for each in found) for i in range(len(most))]
    scarce = [i in slow or largest[i] > size for i, size in enumerate(most)]
    return [_undominated(each, scarce) for each in found]


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


def curve(ways: Ways, seat: Seat, copy_bytes: int, rooms: Rooms) -> Curve:
    """How long a node takes by room; empty if it never fits."""
    low, high = (min(rooms[r][end] for r in seat.resources) for end in (0, 1))
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


Front = tuple[list[int], list[float]]  # rising bytes that stay, falling seconds of work


@dataclass(frozen=True)
class Left:
    """What bundles still to choose from do at least, on each set of devices. `fronts`: by set, of the last
    bundles, all first; `idle`, `busy`: what is there already; `most`: bytes that may stay."""

    fronts: tuple[tuple[Front, ...], ...]
    idle: tuple[int, ...]
    busy: tuple[float, ...]
    most: tuple[int, ...]

    def after(self, choice: Held) -> Left:
        """When a choice from the first bundle is taken."""
        idle = tuple(map(int.__add__, self.idle, choice.idle))
        busy = tuple(map(float.__add__, self.busy, choice.busy))
        return replace(self, fronts=tuple(each[1:] for each in self.fronts), idle=idle, busy=busy)

    def work_s(self) -> float:
        """What the busiest set does at least; infinite where the memory does not suffice."""
        parts = zip(self.fronts, self.idle, self.busy, self.most)
        return max((busy + _least_s(each[0], most - idle) for each, idle, busy, most in parts), default=0.0)


def left(bundles: Sequence[Sequence[Held]], most: Sequence[int], limit_s: float) -> Left:
    """Nothing is taken yet; work of `limit_s` or more need not be told apart."""
    fronts: list[tuple[Front, ...]] = []
    for number, size in enumerate(most):
        found: list[Front] = [([0], [0.0])]
        for bundle in reversed(bundles):
            one = _front(((h.idle[number], h.busy[number]) for h in bundle), size, limit_s)
            found.append(_joined(one, found[-1], size, limit_s))
        fronts.append(tuple(reversed(found)))
    return Left(tuple(fronts), (0,) * len(most), (0.0,) * len(most), tuple(most))


def _joined(one: Front, other: Front, most: int, limit_s: float) -> Front:
    pairs = ((i + j, s + t) for i, s in zip(*one) for j, t in zip(*other))
    return _front(pairs, most, limit_s)


def _front(points: Iterable[tuple[int, float]], most: int, limit_s: float) -> Front:
    idles: list[int] = []
    works: list[float] = []
    for idle, work in sorted(p for p in points if p[0] <= most and p[1] < limit_s):
        if not works or work < works[-1]:
            idles.append(idle)
            works.append(work)
    return idles, works


def _least_s(front: Front, most: int) -> float:
    number = bisect_right(front[0], most)
    return front[1][number - 1] if number else float("inf")
