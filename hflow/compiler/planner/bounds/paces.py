"""How fast the units of one model can be together.

What is fastest for one of them may be slow for another: nodes of a unit share a layout, and weights move
between a trainer and readers that lie otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import le

from hflow.compiler.candidates.node_groups import Unit
from hflow.compiler.planner.renewals import Copy, Renewal
from hflow.compiler.planner.seats import Seat

UNMOVED = -1.0  # better than what moves in no time: no device waits for another
Needs = tuple[float, ...]  # of one node after the other: its seconds, and those of what moves to it
Renew = Callable[[Unit, Seat, Mapping[str, Seat]], Renewal | None]


@dataclass(frozen=True)
class Place:
    """A seat, with what its nodes take at least when all other units leave as much memory as they can."""

    seat: Seat
    times: tuple[float, ...]


@dataclass(frozen=True)
class Pace:
    """`times`: of all nodes; `moves`: of the weights to each reader."""

    times: Mapping[str, float]
    moves: Mapping[str, float]


class Paces:
    """The paces of models, kept: most allocations put a model where some other does."""

    def __init__(self):
        self._known: dict[object, list[Pace]] = {}

    def of(self, units: Sequence[Unit], places: Mapping[str, Sequence[Place]], renew: Renew) -> list[Pace]:
        """Those of all choices for the units of a model that no other choice beats in all respects.

        Args:
            units: a trainer before those that read from it.
            places: of each unit, on the same devices. With more memory no time is longer and no place is
                lost, so that equal times are those of equal places.
            renew: how the weights of a unit in a seat are renewed, if the units before it have their seats.
        """
        key = tuple((unit.name, _where(places[unit.name])) for unit in units)
        if key not in self._known:
            self._known[key] = [_pace(units, needs) for needs in _unbeaten(units, places, renew)]
        return self._known[key]


def _where(places: Sequence[Place]) -> object:
    devices = places[0].seat.devices if places else ()
    return devices[:1], len(devices), tuple(place.times for place in places)


def _pace(units: Sequence[Unit], needs: Needs) -> Pace:
    names = [node.name for unit in units for node in unit.nodes]
    moves = {name: seconds for name, seconds in zip(names, needs[1::2]) if seconds != UNMOVED}
    return Pace(dict(zip(names, needs[::2])), moves)


class _Choosing:
    """Goes through the choices for the units of a model. `kept`: what all nodes need in those that no other
    beats; `least`: what the nodes of the last units need at least, of all of them last."""

    def __init__(self, units: Sequence[Unit], places: Mapping[str, Sequence[Place]], renew: Renew):
        self.units, self.places, self.renew = units, places, renew
        self.kept: list[Needs] = []
        self.least: list[Needs] = [()]
        for unit in reversed(units):
            fastest = map(min, zip(*(place.times for place in places[unit.name])))
            self.least.append(_needs(unit, tuple(fastest)) + self.least[-1])

    def extend(self, seats: Mapping[str, Seat], copies: frozenset[Copy], needs: Needs) -> None:
        """Args: `needs`: of the units that have `seats`, which come first."""
        if len(seats) == len(self.units):
            self.kept = [*(known for known in self.kept if not all(map(le, needs, known))), needs]
            return
        unit = self.units[len(seats)]
        for place in self.places[unit.name]:
            if self._beaten(needs + _needs(unit, place.times), len(seats) + 1):
                continue
            found = self.renew(unit, place.seat, seats)
            new = found if found and found.copy not in copies else None
            renewed = copies | {new.copy} if new else copies
            more = needs + _needs(unit, place.times, new)
            if not new or not self._beaten(more, len(seats) + 1):
                self.extend({**seats, unit.name: place.seat}, renewed, more)

    def _beaten(self, needs: Needs, level: int) -> bool:
        """Whether what begins so is, with the fastest of the others, no better than what is known."""
        every = needs + self.least[len(self.units) - level]
        return any(all(map(le, known, every)) for known in self.kept)


def _unbeaten(units: Sequence[Unit], places: Mapping[str, Sequence[Place]], renew: Renew) -> list[Needs]:
    if not all(places[unit.name] for unit in units):
        return []
    choosing = _Choosing(units, places, renew)
    choosing.extend({}, frozenset(), ())
    return choosing.kept


def _needs(unit: Unit, times: Sequence[float], renewal: Renewal | None = None) -> Needs:
    reader, moves_s = (renewal.reader, renewal.seconds) if renewal else ("", UNMOVED)
    moves = (moves_s if node.name == reader else UNMOVED for node in unit.nodes)
    return tuple(chain.from_iterable(zip(times, moves)))
