"""Choosing seats unit by unit within one allocation; branches that cannot win are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from heapq import nsmallest
from math import prod

from hflow.compiler.cost.redistribution import weights_s
from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.chosen import Chosen
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.paces import Pace, Paces, Place
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.rooms import Curve, Held, Left, Rooms, curve, left, undominated
from hflow.compiler.planner.seats import Seat, sharding_of
from hflow.compiler.planner.unit import Role, Unit

SPLITS = 6  # of intervals of memory, each into halves
FEW = 100_000
LOOK = 100  # bounds that a first look costs
INTERVAL = 20  # bounds that one interval costs
TRIES = 6  # choices of one model that are priced at a time, to begin with something good
FIRST: tuple[Role, ...] = ("train", "generate", "score", "frozen")  # what decides most is chosen first


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
        self.priced: list[float] = []  # bounds of what was priced, and of all that it beats
        self._taken: Chosen | None = None  # by `dive`
        self._parts: list[list[Chosen]] | None = None  # by `descend`
        self._searched = False
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

    def bound_s(self, paces: Paces) -> float:
        """No choice takes less: whatever the others do, the units of each model keep one of its paces."""
        self.best.effort += LOOK
        best = self._bound_s(Chosen())
        for units in self._models():
            if best < self.best.limit_s:
                best = self._paced_s(paces.of(units, self.places, self._with), best)
        return best

    def _paced_s(self, paces: Sequence[Pace], enough_s: float) -> float:
        """With the best of some model's paces and all others at their fastest; `enough_s` where that is no
        less."""
        least = float("inf")
        for pace in paces:
            self.best.effort += 1
            times = {**self.times, **pace.times}
            least = min(least, self.bounds.step_s(times, self.on, pace.moves, self.best.limit_s))
            if least <= enough_s:
                return enough_s
        return least

    def raised_s(self) -> float:
        """What no choice takes less than, after another effort: infinite where none can be better than the
        best, 0 where the budget is spent before.

        First the choices that no other beats are tried: what they are bounded by bounds all. That leaves
        little, so that the others, which are many more, are tried only when they are asked for.
        """
        if self.best.late:
            return 0.0
        if self._searched:
            self._extend(Chosen(), 0)
            self.priced.clear()
        else:
            self._searched, limit_s = True, self.best.limit_s
            bundles = [[c for c in bundle if self._bound_s(c) < limit_s] for bundle in self.descend()]
            if all(bundles):
                self._search(dict.fromkeys(self.free, (0, self.capacity)), bundles, SPLITS)
        left = (bound_s for bound_s in self.priced if bound_s < self.best.limit_s)
        return 0.0 if self.best.late else min(left, default=float("inf"))

    def dive(self) -> Chosen | None:
        """Price, once, what always taking the seat with the least bound leads to: something good to begin
        with. None where some unit has no seat."""
        if self._taken is None and all(self.places.values()):
            self._taken = reduce(self._cheapest, self.order, Chosen())
            self.best.offer(self._taken.seats)
        return self._taken

    def _cheapest(self, chosen: Chosen, unit: Unit) -> Chosen:
        """The seat of `unit` with the least bound taken too."""
        longer = (self._with(chosen, unit, place.seat) for place in self.places[unit.name])
        return min(longer, key=self._bound_s)

    def descend(self) -> list[list[Chosen]]:
        """From there, once, change one model's choice after the other while a step becomes shorter: then more
        can be cut. The bundles to choose from; an empty one where no choice can be better than the best."""
        if self._parts is not None:
            return self._parts
        taken, self._parts = self.dive(), self._bundles()
        if taken is None or not all(self._parts):
            return self._parts
        parts = [next((c for c in b if c.seats.items() <= taken.seats.items()), b[0]) for b in self._parts]
        before = float("inf")
        while self.best.limit_s < before and not self.best.late:
            before = self.best.limit_s
            for number, bundle in enumerate(self._parts):
                others = reduce(Chosen.joined, (*parts[:number], *parts[number + 1 :]), Chosen())
                parts[number] = self._best_with(others, bundle) or parts[number]
        return self._parts

    def _best_with(self, others: Chosen, bundle: Sequence[Chosen]) -> Chosen | None:
        """Which of the choices with the least bounds gives a step shorter than any before."""
        longer = ((self._bound_s(others.joined(part)), number) for number, part in enumerate(bundle))
        found = None
        for bound_s, number in nsmallest(TRIES, longer):
            before = self.best.limit_s
            if bound_s < before:
                self.best.offer(others.joined(bundle[number]).seats)
            if self.best.limit_s < before:
                found = bundle[number]
        return found

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

    def _bundles(self) -> list[list[Chosen]]:
        """For each model the choices for all its units, by themselves below the limit, that no other beats in
        time and memory: whatever contains a worse one has no lower bound."""
        return list(map(self._bundle, self._models()))

    def _models(self) -> list[list[Unit]]:
        """The units of each model."""
        models = dict.fromkeys(unit.model for unit in self.order)
        return [[u for u in self.order if u.model == model] for model in models]

    def _bundle(self, units: Sequence[Unit]) -> list[Chosen]:
        choices = [Chosen()]
        for unit in units:
            longer = (self._with(c, unit, p.seat) for c in choices for p in self.places[unit.name])
            choices = [c for c in longer if self._bound_s(c) < self.best.limit_s]
        return choices

    def _search(self, rooms: Rooms, bundles: Sequence[Sequence[Chosen]], splits: int) -> None:
        """Price what is made of bundles and leaves so much room, part by part where that is much."""
        self.best.effort += INTERVAL
        if self.best.late:
            return
        most = [self.capacity - rooms[r][0] for r in self.free]
        found = undominated([[self._held(c, rooms) for c in bundle] for bundle in bundles], most)
        found.sort(key=len)
        start = left(found, most, self.best.limit_s)
        if start.work_s() >= self.best.limit_s:
            return
        if not splits or prod(map(len, found)) <= FEW:
            self._skim(Chosen(), found, start, rooms)
            return
        resource = max(rooms, key=lambda r: rooms[r][1] - rooms[r][0])
        low, high = rooms[resource]
        middle = (low + high) // 2
        kept = [[h.chosen for h in each] for each in found]
        for half in ((middle + 1, high), (low, middle)):
            self._search({**rooms, resource: half}, kept, splits - 1)

    def _held(self, chosen: Chosen, rooms: Rooms) -> Held | None:
        """None where a node has not enough room."""
        idle, busy = dict.fromkeys(self.free, 0), dict.fromkeys(self.free, 0.0)
        curves: dict[str, Curve] = {}
        tight: set[int] = set()
        numbers = {resource: number for number, resource in enumerate(self.free)}
        for name, seat in chosen.seats.items():
            for node, ways in zip(self.nodes[name], seat.option.ways):
                curves[node] = curve(ways, seat, chosen.copies.get(name, 0), rooms)
                if not curves[node]:
                    return None
                if len(curves[node]) > 1 or curves[node][0][0] > min(rooms[r][0] for r in seat.resources):
                    tight.update(numbers[r] for r in seat.resources)
            work = sum(curves[n][-1][1] * self.bounds.rounds[n] for n in self.nodes[name])
            for resource in seat.resources:
                idle[resource] += seat.option.idle_bytes
                busy[resource] += work
        for reader, seconds in chosen.moves.items():
            for resource in {*self.on[reader], *self.on[self.bounds.trainer_of[reader]]}:
                busy[resource] += seconds
        return Held(chosen, tuple(idle.values()), tuple(busy.values()), curves, frozenset(tight))

    def _skim(self, chosen: Chosen, bundles: Sequence[Sequence[Held]], start: Left, rooms: Rooms) -> None:
        """Price what is made of bundles, the one with the fewest choices first."""
        if self.best.late:
            return
        if not bundles:
            room = (self.capacity - idle for idle in start.idle)
            if all(rooms[r][0] <= size <= rooms[r][1] for r, size in zip(self.free, room)):
                self._price(chosen)
            return
        first, *rest = bundles
        bounded: list[tuple[float, int, Chosen, Left]] = []
        for number, part in enumerate(first):
            after = start.after(part)
            if after.work_s() < self.best.limit_s:
                longer = chosen.joined(part.chosen)
                bounded.append((self._bound_s(longer), number, longer, after))
        for bound_s, _, longer, after in sorted(bounded, key=lambda b: b[:2]):
            if bound_s < self.best.limit_s:
                self._skim(longer, rest, after, rooms)

    def _price(self, chosen: Chosen) -> None:
        self.priced.append(self._bound_s(chosen))
        self.best.offer(chosen.seats)

    def _extend(self, chosen: Chosen, level: int) -> None:
        """Try all seats of the units from `level` on."""
        if self.best.late:
            return
        if level == len(self.order):
            self.best.offer(chosen.seats)
            return
        unit = self.order[level]
        longer = (self._with(chosen, unit, place.seat) for place in self.places[unit.name])
        bounded = [(self._bound_s(c), number, c) for number, c in enumerate(longer)]
        for bound_s, _, choice in sorted(bounded, key=lambda b: b[:2]):
            if bound_s < self.best.limit_s:
                self._extend(choice, level + 1)

    def _with(self, chosen: Chosen, unit: Unit, seat: Seat) -> Chosen:
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
        return Chosen(seats, copies, {**chosen.moves, edges[0].reader: seconds}, chosen.renewed | {key})

    def _bound_s(self, chosen: Chosen) -> float:
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


def _names(unit: Unit) -> set[str]:
    return {node.name for node in unit.nodes}
