"""Choosing seats unit by unit within one allocation; branches that cannot win are cut."""

from __future__ import annotations

import time
from collections.abc import Mapping
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


class Branch:
    """All choices of one allocation."""

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.space = best, bounds, best.space
        self.capacity = self.space.draft.cluster.device.usable_bytes
        self.seats = self.space.seats(allocation)
        self.order = sorted(
            self.space.units, key=lambda u: (FIRST.index(u.role), -self.seats[u.name][0].option.least_s)
        )
        self.idle = {name: min(s.option.idle_bytes for s in seats) for name, seats in self.seats.items()}
        self.places = {
            name: tuple(sorted(set(seats[0].resources).intersection(*(s.resources for s in seats))))
            for name, seats in self.seats.items()
        }
        self.times = {
            node.name: min(s.option.ways[i].least_s + s.option.swap_s for s in self.seats[unit.name])
            for unit in self.order
            for i, node in enumerate(unit.nodes)
        }

    def run(self) -> bool:
        """Try them; False when the time was up before."""
        return self._extend(_Chosen(), 0)

    def _extend(self, chosen: _Chosen, level: int) -> bool:
        if self.best.late:
            return False
        if level == len(self.order):
            self.best.offer(chosen.seats)
            return True
        unit = self.order[level]
        for seat in self.seats[unit.name]:
            longer = self._with(chosen, unit, seat)
            if self._bound_s(longer) < self.best.limit_s and not self._extend(longer, level + 1):
                return False
        return True

    def _with(self, chosen: _Chosen, unit: Unit, seat: Seat) -> _Chosen:
        seats = {**chosen.seats, unit.name: seat}
        edges = [
            e
            for e in self.space.draft.weight_edges
            if e.reader in {n.name for n in unit.nodes} and not e.every
        ]
        if not edges:
            return replace(chosen, seats=seats)
        trainer = seats[self.space.model.unit_of[edges[0].trainer]]
        lies = sharding_of(unit, seat, trainer)
        held = trainer.option.sharding(trainer.mesh)
        key = (unit.model, lies, unit.lag)
        if key in chosen.renewed or (lies == held and not unit.lag):
            return replace(chosen, seats=seats)
        draft = self.space.draft
        seconds = weights_s(
            draft.shapes[unit.model], draft.graph.model(unit.model).dtype, held, lies, draft.cluster
        )
        return _Chosen(
            seats,
            {**chosen.copies, unit.name: seat.option.copy_bytes},
            {**chosen.moves, edges[0].reader: seconds},
            chosen.renewed | {key},
        )

    def _bound_s(self, chosen: _Chosen) -> float:
        """With the fastest seats for all that is not chosen; infinite where the memory does not suffice."""
        free: dict[int, int] = {}
        for unit in self.order:
            seat = chosen.seats.get(unit.name)
            idle = seat.option.idle_bytes if seat else self.idle[unit.name]
            for resource in seat.resources if seat else self.places[unit.name]:
                free[resource] = free.get(resource, self.capacity) - idle
        times, places = dict(self.times), dict[str, tuple[int, ...]]()
        for unit in self.order:
            seat = chosen.seats.get(unit.name)
            places |= dict.fromkeys(
                (n.name for n in unit.nodes), seat.resources if seat else self.places[unit.name]
            )
            if seat is None:
                continue
            limit = min(free[r] for r in seat.resources) - chosen.copies.get(unit.name, 0)
            for node, ways in zip(unit.nodes, seat.option.ways):
                way = ways.fastest(limit)
                if way is None:
                    return float("inf")
                times[node.name] = way.time_s + seat.option.swap_s
        return self.bounds.step_s(times, places, chosen.moves, self.best.limit_s)
