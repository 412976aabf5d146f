"""Bounds of whole allocations, from the least times of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hflow.compiler.planner.bounds import Bounds
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.space import Space


class LeastTimes:
    """The least times on so many devices, whatever else is there. Infinite where something cannot fit."""

    def __init__(self, space: Space, bounds: Bounds):
        self.space, self.bounds = space, bounds
        self.busy_s = cache(self._busy_s)
        self._times = cache(self._least_times)

    def step_s(self, allocation: Allocation) -> float:
        """No plan with this allocation takes less."""
        times: dict[str, float] = {}
        places: dict[str, tuple[int, ...]] = {}
        apart = len(allocation.partition) > 1
        for number, (members, count) in enumerate(zip(allocation.partition, allocation.counts)):
            for unit in self.space.free_units(members):
                times |= self._times(unit.name, count, apart)
                places |= dict.fromkeys((n.name for n in unit.nodes), (number,))
        for unit in (u for u in self.space.units if u.name in self.space.pinned):
            times |= self._times(unit.name, len(self.space.pinned[unit.name]), False)
            places |= dict.fromkeys((n.name for n in unit.nodes), ())
        return self.bounds.step_s(times, places, {})

    def _busy_s(self, members: Sequence[str], count: int, apart: bool) -> float:
        """What a set of models has to do on `count` devices in a step, if its memory suffices."""
        space, rounds = self.space, self.bounds.rounds
        units = space.free_units(members)
        options = {u.name: space.options(u.name, count) for u in units}
        if not all(options.values()):
            return float("inf")
        idle = sum(min(o.idle_bytes for o in each) for each in options.values())
        needs = (
            min(o.least_bytes for o in options[u.name]) for u in units if u.role != "generate" or not apart
        )
        if idle + max(needs, default=0) > space.draft.cluster.device.usable_bytes:
            return float("inf")
        times = {name: s for u in units for name, s in self._times(u.name, count, apart).items()}
        return sum(seconds * rounds[name] for name, seconds in times.items())

    def _least_times(self, name: str, count: int, apart: bool) -> dict[str, float]:
        """Of each node of a unit; generation may use all devices where models are `apart`."""
        unit = next(u for u in self.space.units if u.name == name)
        options = self.space.options(name, count)
        if apart and unit.role == "generate":
            options += self.space.options(name, self.space.num_devices)
        return {
            node.name: min(o.ways[i].least_s + o.swap_s for o in options) for i, node in enumerate(unit.nodes)
        }
