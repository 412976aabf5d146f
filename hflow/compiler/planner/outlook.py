"""What is known of an allocation before its seats are chosen: what each unit does at best, and bounds of
choices of which some seats are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hflow.compiler.cost.redistribution import weights_s
from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.incumbent import BATCH, Incumbent
from hflow.compiler.planner.numbers import Floats
from hflow.compiler.planner.paces import Place
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.seats import Seat, sharding_of
from hflow.compiler.planner.unit import Role, Unit

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
        self.nodes = {unit.name: [n.name for n in unit.nodes] for unit in self.space.units}
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

    def models(self) -> list[list[Unit]]:
        """The units of each model."""
        models = dict.fromkeys(unit.model for unit in self.order)
        return [[u for u in self.order if u.model == model] for model in models]

    def longer(self, chosen: Chosen, unit: Unit) -> list[Chosen]:
        """With each of the seats of `unit` taken too."""
        return [self.with_seat(chosen, unit, place.seat) for place in self.places[unit.name]]

    def with_seat(self, chosen: Chosen, unit: Unit, seat: Seat) -> Chosen:
        """`seat` taken too. A reader whose weights lie elsewhere than the trainer's gets its own copy."""
        seats, edges = {**chosen.seats, unit.name: seat}, self.readers[unit.name]
        if not edges:
            return replace(chosen, seats=seats)
        trainer = seats[self.space.model.unit_of[edges[0].trainer]]
        held, lies = trainer.option.sharding(trainer.mesh), sharding_of(unit, seat, trainer)
        key = (unit.model, lies, unit.lag, unit.nodes[0].in_flight)
        if key in chosen.renewed or (lies == held and not unit.lag):
            return replace(chosen, seats=seats)
        draft = self.space.draft
        model = draft.graph.model(unit.model)
        seconds = weights_s(draft.shapes[unit.model], model.dtype, held, lies, draft.cluster)
        newest = seat.option.idle_bytes if unit.evaluated and lies != held else 0  # beside its older copy
        copies = {**chosen.copies, unit.name: newest if unit.lag else seat.option.copy_bytes}
        return Chosen(seats, copies, {**chosen.moves, edges[0].reader: seconds}, chosen.renewed | {key})

    def bounds_s(self, choices: Sequence[Chosen], enough_s: float | None = None) -> Floats:
        """Of each, with the fastest seats for all other units; infinite where the memory does not suffice."""
        bounds_s = np.full(len(choices), np.inf)
        times = [self._times(chosen) for chosen in choices]
        fitting = [number for number, each in enumerate(times) if each]
        if fitting:
            moves = [choices[number].moves for number in fitting]
            bounds_s[fitting] = self.steps_s(list(filter(None, times)), moves, enough_s)
        return bounds_s

    def _times(self, chosen: Chosen) -> dict[str, float] | None:
        """What the nodes take at least; None where the memory does not suffice."""
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
                    return None
                times[node] = way.time_s + seat.option.swap_s
        return times

    def steps_s(
        self,
        times: Sequence[Mapping[str, float]],
        moves: Sequence[Mapping[str, float]],
        enough_s: float | None = None,
    ) -> Floats:
        """The bounds of choices whose nodes take `times` and whose weights take `moves`."""
        self.best.effort += BATCH + len(times)
        taking = {name: np.array([each[name] for each in times]) for name in self.bounds.nodes}
        readers = dict.fromkeys(reader for each in moves for reader in each)
        moving = {reader: np.array([each.get(reader, np.nan) for each in moves]) for reader in readers}
        return self.bounds.steps_s(taking, self.on, moving, enough_s or self.best.limit_s, closely=False)

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
