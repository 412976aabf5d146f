"""How fast the units of one model can be together.

What is fastest for one of them may be slow for another: nodes of a unit share a layout, and weights move
between a trainer and readers that lie otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import le

from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.seats import Seat
from hflow.compiler.planner.unit import Unit

UNMOVED = -1.0  # better than what moves in no time: no device waits for another
Take = Callable[[Chosen, Unit, Seat], Chosen]


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

    def no_slower(self, other: Pace) -> bool:
        """Both are about the same nodes."""
        mine = (*self.times.values(), *(self.moves.get(name, UNMOVED) for name in self.times))
        theirs = (*other.times.values(), *(other.moves.get(name, UNMOVED) for name in self.times))
        return all(map(le, mine, theirs))


class Paces:
    """The paces of models, kept: most allocations put a model where some other does."""

    def __init__(self):
        self._known: dict[object, list[Pace]] = {}

    def of(self, units: Sequence[Unit], places: Mapping[str, Sequence[Place]], take: Take) -> list[Pace]:
        """Those of all choices for the units of a model that no other choice beats in all respects.

        Args:
            places: of each unit, on the same devices. With more memory no time is longer and no place is
                lost, so that equal times are those of equal places.
            take: a choice with one more seat.
        """
        key = tuple((unit.name, _where(places[unit.name])) for unit in units)
        if key not in self._known:
            self._known[key] = _unbeaten(units, places, take)
        return self._known[key]


def _where(places: Sequence[Place]) -> object:
    devices = places[0].seat.devices if places else ()
    return devices[:1], len(devices), tuple(place.times for place in places)


def _unbeaten(units: Sequence[Unit], places: Mapping[str, Sequence[Place]], take: Take) -> list[Pace]:
    least = {
        node.name: min((place.times[i] for place in places[unit.name]), default=float("inf"))
        for unit in units
        for i, node in enumerate(unit.nodes)
    }
    kept: list[Pace] = []

    def extend(chosen: Chosen, pace: Pace, level: int) -> None:
        if any(known.no_slower(pace) for known in kept):
            return
        if level == len(units):
            kept[:] = [*(known for known in kept if not pace.no_slower(known)), pace]
            return
        unit = units[level]
        for place in places[unit.name]:
            longer = take(chosen, unit, place.seat)
            times = dict(zip((node.name for node in unit.nodes), place.times))
            extend(longer, Pace({**pace.times, **times}, longer.moves), level + 1)

    extend(Chosen(), Pace(least, {}), 0)
    return kept
