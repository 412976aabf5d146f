"""Bounds of whole allocations, from the least times of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.space import Space

NEVER = float("inf")


class LeastTimes:
    """The least times on so many devices, whatever else is there; infinite where something cannot fit."""

    def __init__(self, space: Space, bounds: Bounds):
        self.space, self.bounds = space, bounds
        self.busy_s = cache(self._busy_s)
        self._times = cache(self._least_times)

    def step_s(self, allocation: Allocation) -> float:
        """No plan with this allocation takes less."""
        space = self.space
        times: dict[str, float] = {}
        places: dict[str, tuple[int, ...]] = {}
        count_of = {
            model: (number, count)
            for number, (members, count) in enumerate(zip(allocation.partition, allocation.counts))
            for model in members
        }
        for unit in space.units:
            if unit.name in space.pinned:
                on, count = (), len(space.pinned[unit.name])
            elif unit.name in allocation.spread:
                on, count = tuple(range(len(allocation.partition))), space.num_devices
            else:
                number, count = count_of[unit.model]
                on = (number,)
            times |= self._times(unit.name, count)
            places |= dict.fromkeys((n.name for n in unit.nodes), on)
        return self.bounds.step_s(times, places, {})

    def work_s(self) -> float:
        """No plan takes less: each unit occupies so many devices for so long, and there are only so many."""
        work = 0.0
        for unit in self.space.units:
            runs = [self.bounds.rounds[node.name] for node in unit.nodes]
            work += min(
                count * sum(times * (ways.least_s + o.swap_s) for times, ways in zip(runs, o.ways))
                for count, options in self.space.draft.candidates[unit.name].items()
                for o in options
            )
        return work / self.space.num_devices

    def _busy_s(self, members: Sequence[str], count: int, spread: frozenset[str]) -> float:
        """What a set of models has to do on `count` devices in a step, if its memory suffices."""
        space, rounds = self.space, self.bounds.rounds
        units = [u for u in space.free_units(members) if u.name not in spread]
        options = [space.options(u.name, count) for u in units]
        if not all(options):
            return NEVER
        idle = sum(min(o.idle_bytes for o in each) for each in options)
        needs = (min(o.least_bytes for o in each) for each in options)
        if idle + max(needs, default=0) > space.draft.cluster.device.usable_bytes:
            return NEVER
        times = {name: s for u in units for name, s in self._times(u.name, count).items()}
        times |= {name: s for unit in spread for name, s in self._times(unit, space.num_devices).items()}
        return sum(seconds * rounds[name] for name, seconds in times.items())

    def _least_times(self, name: str, count: int) -> dict[str, float]:
        """Of each node of a unit."""
        unit = next(u for u in self.space.units if u.name == name)
        options = self.space.options(name, count)
        return {
            node.name: min((o.ways[i].least_s + o.swap_s for o in options), default=NEVER)
            for i, node in enumerate(unit.nodes)
        }
