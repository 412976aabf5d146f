"""What is known of an allocation before its seats are chosen: what each unit does at best, and bounds of
choices of which some seats are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hflow.compiler.candidates.node_groups import Role, Unit
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.bundle import Bundles
from hflow.compiler.planner.bounds.numbers import Floats, Ints
from hflow.compiler.planner.bounds.paces import Place
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.incumbent import BATCH, Incumbent
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.renewals import Renewal
from hflow.compiler.planner.seats import Seat

FIRST: tuple[Role, ...] = ("train", "generate", "score", "frozen")  # what decides most is chosen first


class Outlook:
    """`free`: bytes on each set of devices if every unit leaves as many as it can. `places`: of each unit;
    `times`: the least of each node. `on`: the sets of devices of nodes. `order`: of choosing."""

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
        self.room = np.array(list(self.free.values()), dtype=np.int64)
        self.idles = {n: self._on_sets(size, self.resources[n]) for n, size in self.idle.items()}
        self.places = {name: self._places(name, each) for name, each in seats.items()}
        self.order = sorted(self.space.units, key=self._rank)
        edges = [e for e in self.space.draft.weight_edges if not e.every]
        self.readers = {
            unit.name: next((e for e in edges if e.reader in _names(unit)), None) for unit in self.order
        }
        self.on = {n.name: self.resources[u.name] for u in self.order for n in u.nodes}
        steps = max((len(w.ways) for each in seats.values() for s in each for w in s.option.ways), default=1)
        self.bundles = Bundles(self.space.units, self.on, tuple(self.free), steps, bounds)
        self.times = {
            node.name: min((p.times[i] for p in self.places[unit.name]), default=float("inf"))
            for unit in self.order
            for i, node in enumerate(unit.nodes)
        }

    def models(self) -> list[list[Unit]]:
        """The units of each model."""
        models = dict.fromkeys(unit.model for unit in self.order)
        return [[u for u in self.order if u.model == model] for model in models]

    def longer(self, chosen: Chosen, unit: Unit) -> list[Chosen]:
        """With each of the seats of `unit` taken too."""
        return [self.with_seat(chosen, unit, place.seat) for place in self.places[unit.name]]

    def with_seat(self, chosen: Chosen, unit: Unit, seat: Seat) -> Chosen:
        """`seat` taken too. A reader whose weights lie elsewhere than the trainer's gets its own copy."""
        seats, new = {**chosen.seats, unit.name: seat}, self.renewal(unit, seat, chosen.seats)
        if new is None or new.copy in chosen.renewed:
            return Chosen(seats, chosen.copies, chosen.moves, chosen.renewed)
        copies = {**chosen.copies, unit.name: new.copy_bytes}
        return Chosen(seats, copies, {**chosen.moves, new.reader: new.seconds}, chosen.renewed | {new.copy})

    def renewal(self, unit: Unit, seat: Seat, seats: Mapping[str, Seat]) -> Renewal | None:
        """How the weights of a unit in `seat` are renewed from its trainer, one of those with `seats`; None
        where they lie there."""
        edge = self.readers[unit.name]
        trainer = seats[self.space.model.unit_of[edge.trainer]] if edge else None
        return self.space.renewals.of(unit, seat, trainer, edge.reader) if edge and trainer else None

    def bounds_s(self, choices: Sequence[Chosen], enough_s: float | None = None) -> Floats:
        """Of each, with the fastest seats for all other units; infinite where the memory does not suffice.
        The choices are for the same units."""
        if not choices:
            return np.zeros(0)
        bundle = self.bundles.of(choices)
        units = list(choices[0].seats)
        least = sum(self.idles[name] for name in units)
        seconds, fits = bundle.times_in(self.room + least - bundle.idle, np.arange(len(choices)))
        bounds_s, some = np.full(len(choices), np.inf), np.flatnonzero(fits)
        if some.size:
            times = dict(zip(bundle.nodes, seconds[some].T))
            rest = {n: np.full(some.shape, self.times[n]) for n in self.bounds.nodes if n not in times}
            moves = dict(zip(bundle.readers, bundle.moves[some].T))
            bounds_s[some] = self.steps_s({**times, **rest}, moves, enough_s)
        return bounds_s

    def steps_s(
        self, times: Mapping[str, Floats], moves: Mapping[str, Floats], enough_s: float | None = None
    ) -> Floats:
        """The bounds of choices whose nodes take `times` and whose weights take `moves`."""
        self.best.effort += BATCH + len(times[self.bounds.nodes[0]])
        return self.bounds.steps_s(times, self.on, moves, enough_s or self.best.limit_s, depth=0)

    def _on_sets(self, size: int, on: Sequence[int]) -> Ints:
        return np.array([size if resource in on else 0 for resource in self.free], dtype=np.int64)

    def _rank(self, unit: Unit) -> tuple[int, float]:
        places = self.places[unit.name]
        return FIRST.index(unit.role), -min((sum(p.times) for p in places), default=0.0)

    def _places(self, name: str, seats: Sequence[Seat]) -> list[Place]:
        """The seats in which every node of the unit can run, the fastest first."""
        found: list[Place] = []
        for seat in seats:
            limit = min(self.free[r] for r in seat.resources) + self.idle[name] - seat.option.idle_bytes
            ways = [each.fastest(limit) for each in seat.option.ways]
            if all(ways):
                found.append(Place(seat, tuple(w.time_s + seat.option.swap_s for w in ways if w)))
        return sorted(found, key=lambda place: sum(place.times))


def _names(unit: Unit) -> set[str]:
    return {node.name for node in unit.nodes}
