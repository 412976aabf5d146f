"""Bounds of whole allocations, and of all that begin alike, from the least times of all nodes."""

from __future__ import annotations

from bisect import bisect_left

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation, Members, Partition
from hflow.compiler.planner.search_space import SearchSpace

NEVER = float("inf")
Spread = frozenset[str]  # node groups
Rung = tuple[int, float]  # so many devices, and the seconds that a set of models is busy on as many or fewer


class LeastTimes:
    """The least times on so many devices, whatever else is there; infinite where something cannot fit."""

    def __init__(self, space: SearchSpace, bounds: Bounds):
        self.space, self.bounds = space, bounds

    def step_s(self, allocation: Allocation, fixed: int | None = None) -> float:
        """No plan with this allocation takes less; with `fixed`, none whose first sets, so many, have these
        counts and whose others have as many devices or fewer."""
        space, sets = self.space, range(len(allocation.partition))
        number_of = {part: n for n, members in enumerate(allocation.partition) for part in members}
        known = set(sets[:fixed])
        times: dict[str, float] = {}
        places: dict[str, tuple[int, ...]] = {}
        for group in space.groups:
            if group.name in space.pinned:
                on, found = (), self._times(group.name, len(space.pinned[group.name]))
            elif group.name in allocation.spread:
                on, found = tuple(sets), self._times(group.name, space.num_devices)
            else:
                number = number_of[space.part_of(group)]
                least = self._times if number in known else self._times_until
                on, found = (number,), least(group.name, allocation.counts[number])
            times |= found
            places |= dict.fromkeys((n.name for n in group.nodes), on)
        return self.bounds.step_s(times, places)

    def shared_out_s(self, sets: Partition, spread: Spread, num_devices: int) -> float:
        """What the busiest of some sets does at least, however `num_devices` are shared out among them."""
        if not sets:
            return 0.0
        levels = self._levels(sets, spread)
        number = bisect_left(
            levels,
            True,
            key=lambda seconds: sum(self.fewest(m, spread, seconds) for m in sets) <= num_devices,
        )
        return levels[number] if number < len(levels) else NEVER

    def fewest(self, members: Members, spread: Spread, seconds: float) -> int:
        """The fewest devices on which a set of models may do its part of a step within `seconds`; more than
        there are where none suffice."""
        rungs = self._rungs(members, spread)
        number = bisect_left(rungs, -seconds, key=lambda rung: -rung[1])
        return rungs[number][0] if number < len(rungs) else self.space.num_devices + 1

    @memoize
    def _rungs(self, members: Members, spread: Spread) -> tuple[Rung, ...]:
        """More and more devices, on which less and less time is enough."""
        found: list[Rung] = []
        for count in self.space.sizes(members):
            seconds = self.busy_s(members, count, spread)
            if seconds < (found[-1][1] if found else NEVER):
                found.append((count, seconds))
        return tuple(found)

    @memoize
    def _levels(self, sets: Partition, spread: Spread) -> tuple[float, ...]:
        return tuple(sorted({seconds for members in sets for _, seconds in self._rungs(members, spread)}))

    @memoize
    def busy_s(self, members: Members, count: int, spread: Spread) -> float:
        """What a set of models has to do on `count` devices in a step, if its memory suffices."""
        space = self.space
        groups = [g for g in space.free_groups(members) if g.name not in spread]
        candidates = [space.candidates(g.name, count) for g in groups]
        if not all(candidates):
            return NEVER
        idle = sum(min(c.idle_bytes for c in each) for each in candidates)
        needs = (min(c.least_bytes for c in each) for each in candidates)
        if idle + max(needs, default=0) > space.draft.cluster.device.usable_bytes:
            return NEVER
        own = sum(self._work_s(group.name, count) for group in groups)
        return own + sum(self._work_s(name, space.num_devices) for name in spread)

    @memoize
    def _work_s(self, name: str, count: int) -> float:
        """Of all runs of a node group's nodes in a step, in one candidate."""
        group = next(g for g in self.space.groups if g.name == name)
        runs = [self.bounds.rounds[node.name] for node in group.nodes]
        candidates = self.space.candidates(name, count)
        return min(
            (sum(n * (w.least_s + c.swap_s) for n, w in zip(runs, c.fronts)) for c in candidates),
            default=NEVER,
        )

    @memoize
    def _times(self, name: str, count: int) -> dict[str, float]:
        """Of each node of a node group."""
        group = next(g for g in self.space.groups if g.name == name)
        candidates = self.space.candidates(name, count)
        return {
            node.name: min((c.fronts[i].least_s + c.swap_s for c in candidates), default=NEVER)
            for i, node in enumerate(group.nodes)
        }

    @memoize
    def _times_until(self, name: str, count: int) -> dict[str, float]:
        """The same on `count` devices or fewer."""
        counts = [n for n in self.space.draft.candidates[name] if n <= count]
        found = [self._times(name, n) for n in counts]
        group = next(g for g in self.space.groups if g.name == name)
        return {n.name: min((times[n.name] for times in found), default=NEVER) for n in group.nodes}
