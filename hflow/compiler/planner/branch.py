"""Choosing seats unit by unit within one allocation; branches that cannot win are cut."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hflow.compiler.cost.redistribution import weights_s
from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.choice import Choice, fastest_ways, node_times
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.seats import Seat, sharding_of
from hflow.compiler.planner.space import Space
from hflow.compiler.planner.unit import Role, Unit
from hflow.compiler.sharding import Sharding

RESOLUTION = 1e-3  # steps that differ by less count as equally long: predictions are not that good
FIRST: tuple[Role, ...] = ("train", "generate", "score", "frozen")  # what decides most is chosen first


@dataclass
class Incumbent:
    """The best choice so far. `explored`: choices that were priced."""

    space: Space
    deadline: float = float("inf")
    resolution: float = RESOLUTION
    choice: Choice | None = None
    explored: int = 0

    @property
    def limit_s(self) -> float:
        """Whatever takes at least so long need not be looked at."""
        return self.choice.step_s * (1 - self.resolution) if self.choice else float("inf")

    @property
    def late(self) -> bool:
        """Whether the time is up, and there is something to show for it."""
        return self.choice is not None and time.monotonic() > self.deadline

    def offer(self, seats: Mapping[str, Seat]) -> None:
        """Price a complete choice, and keep it if it fits and is the best."""
        units = self.space.units
        ways = fastest_ways(units, seats, self.space.draft.cluster.device.usable_bytes)
        if ways is None:
            return
        self.explored += 1
        step_s = self.space.model.step_s(seats, node_times(units, seats, ways))
        if self.choice is None or step_s < self.choice.step_s:
            self.choice = Choice(dict(seats), ways, step_s)


@dataclass(frozen=True)
class _Chosen:
    """The seats chosen so far. `copies`: bytes of a reader's own copy; `moves`: seconds that weights need to
    reach a reader, by node."""

    seats: Mapping[str, Seat] = field(default_factory=dict[str, Seat])
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    moves: Mapping[str, float] = field(default_factory=dict[str, float])
    renewed: frozenset[tuple[str, Sharding, int]] = frozenset()

    def joined(self, other: _Chosen) -> _Chosen:
        """Both; they are about units of different models."""
        return _Chosen(
            {**self.seats, **other.seats},
            {**self.copies, **other.copies},
            {**self.moves, **other.moves},
            self.renewed | other.renewed,
        )


@dataclass(frozen=True)
class _Place:
    """A seat, with what its nodes take at least when all other units leave as much memory as they can."""

    seat: Seat
    times: tuple[float, ...]


class Branch:
    """All choices of one allocation."""

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.space = best, bounds, best.space
        self.capacity = self.space.draft.cluster.device.usable_bytes
        seats = self.space.seats(allocation)
        self.resources = {name: each[0].resources if each else () for name, each in seats.items()}
        self.idle = {
            name: min((s.option.idle_bytes for s in each), default=0) for name, each in seats.items()
        }
        self.places = {name: self._places(name, each) for name, each in seats.items()}
        self.order = sorted(self.space.units, key=self._rank)
        self.readers = {
            unit.name: [e for e in self.space.draft.weight_edges if e.reader in _names(unit) and not e.every]
            for unit in self.order
        }
        self.on = {n.name: self.resources[u.name] for u in self.order for n in u.nodes}
        self.times = {
            node.name: min((p.times[i] for p in self.places[unit.name]), default=float("inf"))
            for unit in self.order
            for i, node in enumerate(unit.nodes)
        }

    def run(self) -> bool:
        """Try them; False when the time was up before."""
        if self._bound_s(_Chosen(), self.times) >= self.best.limit_s:
            return True
        skimmed_s = self._skim(_Chosen(), self._bundles())
        return skimmed_s >= self.best.limit_s or self._extend(_Chosen(), 0)

    def _rank(self, unit: Unit) -> tuple[int, float]:
        places = self.places[unit.name]
        return FIRST.index(unit.role), -min((sum(p.times) for p in places), default=0.0)

    def _places(self, name: str, seats: Sequence[Seat]) -> list[_Place]:
        """The seats in which every node of the unit can run, the fastest first."""
        found: list[_Place] = []
        free = self._free({n: size for n, size in self.idle.items() if n != name})
        for seat in seats:
            limit = min(free[r] for r in seat.resources) - seat.option.idle_bytes
            ways = [each.fastest(limit) for each in seat.option.ways]
            if all(ways):
                found.append(_Place(seat, tuple(w.time_s + seat.option.swap_s for w in ways if w)))
        return sorted(found, key=lambda place: sum(place.times))

    def _free(self, idle: Mapping[str, int]) -> dict[int, int]:
        """Bytes that are left on each set of devices beside what units keep there."""
        free = dict.fromkeys((r for each in self.resources.values() for r in each), self.capacity)
        for name, size in idle.items():
            for resource in self.resources[name]:
                free[resource] -= size
        return free

    def _bundles(self) -> list[list[_Chosen]]:
        """For each model the choices for all its units, by themselves below the limit, that no other beats in
        time and memory: whatever contains a worse one has no lower bound."""
        models = dict.fromkeys(unit.model for unit in self.order)
        found = [self._bundle([u for u in self.order if u.model == model]) for model in models]
        return sorted(found, key=len)

    def _bundle(self, units: Sequence[Unit]) -> list[_Chosen]:
        choices = [_Chosen()]
        for unit in units:
            longer = (self._with(c, unit, p.seat) for c in choices for p in self.places[unit.name])
            choices = [c for c in longer if self._bound_s(c, self._times(c)) < self.best.limit_s]
        return _front(units, choices)

    def _skim(self, chosen: _Chosen, bundles: Sequence[Sequence[_Chosen]]) -> float:
        """Price what is made of bundles; the least bound among it."""
        if not bundles:
            self.best.offer(chosen.seats)
            return self._bound_s(chosen, self._times(chosen))
        joined = map(chosen.joined, bundles[0])
        bounded = [(self._bound_s(c, self._times(c)), number, c) for number, c in enumerate(joined)]
        least = float("inf")
        for bound_s, _, choice in sorted(bounded, key=lambda b: b[:2]):
            if bound_s >= self.best.limit_s or self.best.late:
                return min(least, bound_s)
            least = min(least, self._skim(choice, bundles[1:]))
        return least

    def _extend(self, chosen: _Chosen, level: int) -> bool:
        """Try all seats of the units from `level` on; False when the time is up."""
        if self.best.late:
            return False
        if level == len(self.order):
            self.best.offer(chosen.seats)
            return True
        unit = self.order[level]
        longer = (self._with(chosen, unit, place.seat) for place in self.places[unit.name])
        bounded = [(self._bound_s(c, self._times(c)), number, c) for number, c in enumerate(longer)]
        for bound_s, _, choice in sorted(bounded, key=lambda b: b[:2]):
            if bound_s >= self.best.limit_s:
                break
            if not self._extend(choice, level + 1):
                return False
        return True

    def _with(self, chosen: _Chosen, unit: Unit, seat: Seat) -> _Chosen:
        """`seat` taken too. A reader whose weights lie elsewhere than the trainer's gets its own copy."""
        seats, edges = {**chosen.seats, unit.name: seat}, self.readers[unit.name]
        if not edges:
            return replace(chosen, seats=seats)
        trainer = seats[self.space.model.unit_of[edges[0].trainer]]
        held, lies = trainer.option.sharding(trainer.mesh), sharding_of(unit, seat, trainer)
        key = (unit.model, lies, unit.lag)
        if key in chosen.renewed or (lies == held and not unit.lag):
            return replace(chosen, seats=seats)
        draft = self.space.draft
        model = draft.graph.model(unit.model)
        seconds = weights_s(draft.shapes[unit.model], model.dtype, held, lies, draft.cluster)
        copies = {**chosen.copies, unit.name: seat.option.copy_bytes}
        return _Chosen(seats, copies, {**chosen.moves, edges[0].reader: seconds}, chosen.renewed | {key})

    def _times(self, chosen: _Chosen) -> Mapping[str, float] | None:
        """Least times of all nodes; None where the memory does not suffice."""
        free = self._free(self.idle | {name: s.option.idle_bytes for name, s in chosen.seats.items()})
        times = dict(self.times)
        for unit in (u for u in self.order if u.name in chosen.seats):
            seat = chosen.seats[unit.name]
            limit = min(free[r] for r in seat.resources) - chosen.copies.get(unit.name, 0)
            for node, ways in zip(unit.nodes, seat.option.ways):
                way = ways.fastest(limit)
                if way is None:
                    return None
                times[node.name] = way.time_s + seat.option.swap_s
        return times

    def _bound_s(self, chosen: _Chosen, times: Mapping[str, float] | None) -> float:
        if times is None:
            return float("inf")
        return self.bounds.step_s(times, self.on, chosen.moves, self.best.limit_s)


def _front(units: Sequence[Unit], choices: Sequence[_Chosen]) -> list[_Chosen]:
    """The choices of seats for `units` that no other beats, however much memory there is."""
    kept: list[_Chosen] = []
    for choice in choices:
        if not any(_no_worse(units, other, choice) for other in kept):
            kept = [other for other in kept if not _no_worse(units, choice, other)] + [choice]
    return kept


def _no_worse(units: Sequence[Unit], one: _Chosen, other: _Chosen) -> bool:
    """Whether `one` needs no more memory and time than `other`, weights that move included."""
    idle = (sum(c.seats[u.name].option.idle_bytes for u in units) for c in (one, other))
    if next(idle) > next(idle) or sum(one.moves.values()) > sum(other.moves.values()):
        return False
    for unit in units:
        mine, theirs = one.seats[unit.name].option, other.seats[unit.name].option
        spare = other.copies.get(unit.name, 0) - one.copies.get(unit.name, 0)
        for own, others in zip(mine.ways, theirs.ways):
            pairs = ((own.fastest(way.need_bytes + spare), way) for way in others.ways)
            if any(w is None or w.time_s + mine.swap_s > way.time_s + theirs.swap_s for w, way in pairs):
                return False
    return True


def _names(unit: Unit) -> set[str]:
    return {node.name for node in unit.nodes}
