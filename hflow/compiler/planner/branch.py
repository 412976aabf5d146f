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
PRICE = 10  # pricing a choice takes about as long as so many bounds
FIRST: tuple[Role, ...] = ("train", "generate", "score", "frozen")  # what decides most is chosen first


@dataclass
class Incumbent:
    """The best choice so far. `explored`: choices that were priced; `effort`: bounds that were computed, of
    which there may be `most`, until the `deadline`."""

    space: Space
    deadline: float = float("inf")
    resolution: float = RESOLUTION
    choice: Choice | None = None
    explored: int = 0
    effort: int = 0
    most: float = float("inf")

    @property
    def limit_s(self) -> float:
        """Whatever takes at least so long need not be looked at."""
        return self.choice.step_s * (1 - self.resolution) if self.choice else float("inf")

    @property
    def late(self) -> bool:
        """Whether the budget is spent, and there is something to show for it."""
        spent = self.effort > self.most or time.monotonic() > self.deadline
        return spent and self.choice is not None

    def offer(self, seats: Mapping[str, Seat]) -> None:
        """Price a complete choice, and keep it if it fits and is the best."""
        units = self.space.units
        ways = fastest_ways(units, seats, self.space.draft.cluster.device.usable_bytes)
        if ways is None:
            return
        self.explored += 1
        self.effort += PRICE
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
        self.free = dict.fromkeys((r for each in self.resources.values() for r in each), self.capacity)
        for name, size in self.idle.items():
            for resource in self.resources[name]:
                self.free[resource] -= size
        self.nodes = {unit.name: [n.name for n in unit.nodes] for unit in self.space.units}
        self.priced: list[float] = []  # bounds of what was priced
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
        """Try them; False when the budget was spent before."""
        if self._bound_s(_Chosen()) >= self.best.limit_s:
            return True
        self.dive()
        self._skim(_Chosen(), self._bundles())
        if self.best.late:
            return False
        settled = all(bound_s >= self.best.limit_s for bound_s in self.priced)
        return settled or self._extend(_Chosen(), 0)

    def dive(self) -> None:
        """Price what always taking the seat with the least bound leads to: something good to begin with."""
        if not all(self.places.values()):
            return
        chosen = _Chosen()
        for unit in self.order:
            longer = [self._with(chosen, unit, place.seat) for place in self.places[unit.name]]
            chosen = min(longer, key=self._bound_s)
        self.best.offer(chosen.seats)

    def _rank(self, unit: Unit) -> tuple[int, float]:
        places = self.places[unit.name]
        return FIRST.index(unit.role), -min((sum(p.times) for p in places), default=0.0)

    def _places(self, name: str, seats: Sequence[Seat]) -> list[_Place]:
        """The seats in which every node of the unit can run, the fastest first."""
        found: list[_Place] = []
        for seat in seats:
            limit = min(self.free[r] for r in seat.resources) + self.idle[name] - seat.option.idle_bytes
            ways = [each.fastest(limit) for each in seat.option.ways]
            if all(ways):
                found.append(_Place(seat, tuple(w.time_s + seat.option.swap_s for w in ways if w)))
        return sorted(found, key=lambda place: sum(place.times))

    def _bundles(self) -> list[list[_Chosen]]:
        """For each model the choices for all its units, by themselves below the limit, that no other beats in
        time and memory: whatever contains a worse one has no lower bound."""
        models = dict.fromkeys(unit.model for unit in self.order)
        return [self._bundle([u for u in self.order if u.model == model]) for model in models]

    def _bundle(self, units: Sequence[Unit]) -> list[_Chosen]:
        choices = [_Chosen()]
        for unit in units:
            longer = (self._with(c, unit, p.seat) for c in choices for p in self.places[unit.name])
            choices = [c for c in longer if self._bound_s(c) < self.best.limit_s]
        return _front(units, choices)

    def _skim(self, chosen: _Chosen, bundles: Sequence[Sequence[_Chosen]]) -> None:
        """Price what is made of bundles, the one with the fewest possible choices first."""
        if self.best.late:
            return
        if not bundles:
            self.priced.append(self._bound_s(chosen))
            self.best.offer(chosen.seats)
            return
        first, *rest = sorted((self._below_limit(chosen, bundle) for bundle in bundles), key=len)
        for bound_s, part in first:
            if bound_s < self.best.limit_s:
                self._skim(chosen.joined(part), [[other for _, other in bundle] for bundle in rest])

    def _below_limit(self, chosen: _Chosen, bundle: Sequence[_Chosen]) -> list[tuple[float, _Chosen]]:
        """What of a bundle may follow `chosen`, with the bound of both; the least first."""
        bounded = [(self._bound_s(chosen.joined(part)), part) for part in bundle]
        return sorted((b for b in bounded if b[0] < self.best.limit_s), key=lambda b: b[0])

    def _extend(self, chosen: _Chosen, level: int) -> bool:
        """Try all seats of the units from `level` on; False when the time is up."""
        if self.best.late:
            return False
        if level == len(self.order):
            self.best.offer(chosen.seats)
            return True
        unit = self.order[level]
        longer = (self._with(chosen, unit, place.seat) for place in self.places[unit.name])
        bounded = [(self._bound_s(c), number, c) for number, c in enumerate(longer)]
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
        newest = seat.option.idle_bytes if unit.evaluated and lies != held else 0  # beside its older copy
        copies = {**chosen.copies, unit.name: newest if unit.lag else seat.option.copy_bytes}
        return _Chosen(seats, copies, {**chosen.moves, edges[0].reader: seconds}, chosen.renewed | {key})

    def _bound_s(self, chosen: _Chosen) -> float:
        """With the fastest seats for all other units; infinite where the memory does not suffice."""
        self.best.effort += 1
        free, times = dict(self.free), dict(self.times)
        for name, seat in chosen.seats.items():
            more = seat.option.idle_bytes - self.idle[name]
            for resource in seat.resources:
                free[resource] -= more
        for name, seat in chosen.seats.items():
            limit = min(map(free.__getitem__, seat.resources)) - chosen.copies.get(name, 0)
            for node, ways in zip(self.nodes[name], seat.option.ways):
                way = ways.fastest(limit)
                if way is None:
                    return float("inf")
                times[node] = way.time_s + seat.option.swap_s
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
