"""Bounds of whole allocations, and of all that begin alike, from the least times of all nodes: in the memory
that is left when each node group keeps as little as it can."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.memory_stairs import NEVER, MemoryStairs, group_steps, node_steps
from hflow.compiler.planner.bounds.set_places import SetPlaces
from hflow.compiler.planner.bounds.work_in_memory import WorkCurves, WorkInMemory
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation, Members, Partition
from hflow.compiler.planner.search_space import SearchSpace

Spread = frozenset[str]  # node groups
Rung = tuple[int, float]  # so many devices, and the seconds that a set of models is busy on as many or fewer


@dataclass(frozen=True)
class SetTimes:
    """Of models on one set of devices: the least `times` of their nodes, the bytes that each node group may
    fill (`limits`), and those that are left when all keep as little as they can."""

    times: Mapping[str, float]
    limits: Mapping[str, int]
    left_bytes: int


class LeastTimes:
    """The least times on so many devices; infinite where something cannot fit."""

    def __init__(self, space: SearchSpace, bounds: Bounds):
        self.space, self.bounds, self.places = space, bounds, SetPlaces(space)
        self._groups = {group.name: group for group in space.groups}
        self._in_memory: dict[tuple[Members, int, Spread], float] = {}
        self.intervals = 0  # of memory, in which the work of sets was looked at

    def step_s(self, allocation: Allocation, fixed: int | None = None) -> float:
        """No plan with this allocation takes less; with `fixed`, none whose first sets, so many, have these
        counts and whose others have as many devices or fewer."""
        return self.bounds.step_s(*self.times(allocation, fixed))

    def times(
        self, allocation: Allocation, fixed: int | None = None
    ) -> tuple[dict[str, float], dict[str, tuple[int, ...]]]:
        """The least times of all nodes in it, and the sets that they are on."""
        times = dict(self._pinned_times)
        for of_set in self._sets(allocation, fixed):
            times |= of_set.times
        for name, limit_bytes in self._spread_limits(allocation, fixed):
            times |= self._times(name, self.space.num_devices, False, limit_bytes)
        known = len(allocation.partition) if fixed is None else fixed
        return times, self.places.of(allocation, known)

    def limits(self, allocation: Allocation, fixed: int | None = None) -> dict[str, int]:
        """The bytes that each node group may fill, kept and needed by a node, if the others keep as little as
        they can."""
        limits = dict.fromkeys(self.space.pinned, self.space.capacity)
        for of_set in self._sets(allocation, fixed):
            limits |= of_set.limits
        return limits | dict(self._spread_limits(allocation, fixed))

    def _sets(self, allocation: Allocation, fixed: int | None) -> list[SetTimes]:
        known, spread = len(allocation.partition) if fixed is None else fixed, allocation.spread
        each = enumerate(zip(allocation.partition, allocation.counts))
        return [self._of_set(members, count, number >= known, spread) for number, (members, count) in each]

    def _spread_limits(self, allocation: Allocation, fixed: int | None) -> Iterator[tuple[str, int]]:
        """Of node groups on all devices: what the fullest set leaves."""
        if allocation.spread:
            none = self.space.capacity - self._spread_bytes(allocation.spread)
            left = min((of_set.left_bytes for of_set in self._sets(allocation, fixed)), default=none)
            for name in allocation.spread:
                every = self.space.num_devices
                yield name, self._step(name, every, False, left + self._idle(name, every, False))

    @memoize
    def _of_set(self, members: Members, count: int, until: bool, spread: Spread) -> SetTimes:
        groups = self._on(members, spread)
        idle = {group.name: self._idle(group.name, count, until) for group in groups}
        left = self.space.capacity - self._spread_bytes(spread) - sum(idle.values())
        limits = {name: self._step(name, count, until, left + own) for name, own in idle.items()}
        times: dict[str, float] = {}
        for name, limit_bytes in limits.items():
            times |= self._times(name, count, until, limit_bytes)
        return SetTimes(times, limits, left)

    def _step(self, name: str, count: int, until: bool, limit_bytes: int) -> int:
        """The most bytes, up to a limit, that make a difference to a node group; the limit where none do."""
        steps = self._steps(name, count, until)
        number = bisect_right(steps, limit_bytes)
        return steps[number - 1] if number else limit_bytes

    @memoize
    def _steps(self, name: str, count: int, until: bool) -> list[int]:
        """The bytes from which on a node may run in one more configuration, ascending."""
        counts = self._counts(name, count)
        sizes = counts if until else counts[-1:]
        candidates = chain.from_iterable(self.space.candidates(name, size) for size in sizes)
        needed = (c.idle_bytes + w.need_bytes for c in candidates for each in c.fronts for w in each.configs)
        return sorted({*needed})

    @cached_property
    def _pinned_times(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, devices in self.space.pinned.items():
            found |= self._times(name, len(devices), False, self.space.capacity)
        return found

    def shared_out_s(self, sets: Partition, spread: Spread, num_devices: int) -> float:
        """What the busiest of some sets does at least, however `num_devices` are shared out among them."""
        if not sets:
            return 0.0
        levels, spared = self._levels(sets, spread)
        number = bisect_left(spared, -num_devices)
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
    def _levels(self, sets: Partition, spread: Spread) -> tuple[list[float], list[int]]:
        """More and more seconds, within which some of `sets` are done on fewer devices; and, below 0, the
        devices that all of them then need."""
        rungs = [np.array(self._rungs(members, spread) or [(0.0, NEVER)]).T[:, ::-1] for members in sets]
        levels = np.unique(np.concatenate([seconds for _, seconds in rungs]))
        needed = np.zeros(len(levels))
        for counts, seconds in rungs:
            enough = np.searchsorted(seconds, levels, side="right")
            needed += np.where(enough > 0, counts[enough - 1], np.inf)
        found = needed <= self.space.num_devices
        return levels[found].tolist(), (-needed[found]).tolist()

    def ungrouped_s(self, parts: Partition, spread: Spread, num_devices: int) -> float:
        """What some parts do at least on `num_devices`, whichever of them share a set: none may take longer
        by itself, and all together not more seconds of devices than there are."""
        if not parts:
            return 0.0
        least = [self._alone(part, spread, num_devices) for part in parts]
        others_s = self._spread_s(spread)
        together_s = others_s + sum(area for _, area in least) / num_devices if num_devices else NEVER
        return max(together_s, *(seconds for seconds, _ in least))

    @memoize
    def _alone(self, part: Members, spread: Spread, most: int) -> tuple[float, float]:
        """The least seconds of a set with one part on `most` devices or fewer, and the least product of its
        own seconds and its devices."""
        counts = [count for count in self.space.sizes(part) if count <= most]
        busy = [self.busy_s(part, count, spread) for count in counts]
        areas = (count * self._own_s(part, count, spread) for count in counts)
        return min(busy, default=NEVER), min(areas, default=NEVER)

    @memoize
    def _spread_s(self, spread: Spread) -> float:
        """What the node groups on all devices do, beside nothing else."""
        every = self.space.num_devices
        free = self.space.capacity - self._spread_bytes(spread)
        return sum(self._work_s(name, every, free + self._idle(name, every, False)) for name in spread)

    @memoize
    def busy_s(self, members: Members, count: int, spread: Spread) -> float:
        """What a set of models has to do on `count` devices in a step, if its memory suffices."""
        own, every = self._own_s(members, count, spread), self.space.num_devices
        if own == NEVER:
            return NEVER
        free = self._free_bytes(members, count, spread)
        others = ((name, self._idle(name, every, False)) for name in spread)
        return own + sum(self._work_s(name, every, free + size) for name, size in others)

    @memoize
    def _own_s(self, members: Members, count: int, spread: Spread) -> float:
        """The same without the node groups on all devices, but in the memory that they leave."""
        names = [group.name for group in self._on(members, spread)]
        if not all(self.space.candidates(name, count) for name in names):
            return NEVER
        free = self._free_bytes(members, count, spread)
        return sum(self._work_s(name, count, free + self._idle(name, count, False)) for name in names)

    @memoize
    def _free_bytes(self, members: Members, count: int, spread: Spread) -> int:
        """What is left on a device where all keep as little as they can."""
        kept = sum(self._idle(group.name, count, False) for group in self._on(members, spread))
        return self.space.capacity - self._spread_bytes(spread) - kept

    def set_work_s(self, members: Members, count: int, spread: Spread, limit_s: float) -> float:
        """The same in the memory of `count` devices, closer; or something that is not below `limit_s`."""
        key = members, count, spread
        if key not in self._in_memory:
            on = [
                *((g.name, count) for g in self._on(members, spread)),
                *((n, self.space.num_devices) for n in spread),
            ]
            work = WorkInMemory([self._work_curves(*each) for each in on], self.space.capacity)
            self._in_memory[key] = work.least_s(limit_s)
            self.intervals += work.looked_at
        return self._in_memory[key]

    @memoize
    def _work_curves(self, name: str, count: int) -> WorkCurves:
        return WorkCurves.of(self.space.candidates(name, count), self._runs(name))

    @memoize
    def _on(self, members: Members, spread: Spread) -> list[NodeGroup]:
        """The node groups of a set that are on its devices only."""
        return [group for group in self.space.free_groups(members) if group.name not in spread]

    @memoize
    def _spread_bytes(self, spread: Spread) -> int:
        """What the node groups on all devices keep there at least."""
        return sum(self._idle(name, self.space.num_devices, False) for name in spread)

    @memoize
    def _idle(self, name: str, count: int, until: bool) -> int:
        """What a node group keeps on a device at least."""
        counts = self._counts(name, count)
        if until and counts[1:]:
            return min(self._idle(name, counts[-2], True), self._idle(name, counts[-1], False))
        return min((c.idle_bytes for c in self.space.candidates(name, count)), default=0)

    @memoize
    def _work_s(self, name: str, count: int, limit_bytes: int) -> float:
        """Of all runs of a node group's nodes in a step, in one candidate, where the group may fill so many
        bytes."""
        return self._work_stairs(name, count).within(limit_bytes)

    @memoize
    def _times(self, name: str, count: int, until: bool, limit_bytes: int) -> dict[str, float]:
        """Of each node of a node group that may fill so many bytes."""
        return {node: stairs.within(limit_bytes) for node, stairs in self._stairs(name, count, until).items()}

    @memoize
    def _stairs(self, name: str, count: int, until: bool) -> dict[str, MemoryStairs]:
        """Of each node of a node group on so many devices; with `until`, or on fewer."""
        counts = self._counts(name, count)
        if until and counts[1:]:  # what those on fewer come to is known already
            fewer, these = self._stairs(name, counts[-2], True), self._stairs(name, counts[-1], False)
            return {node: fewer[node].joined(these[node]) for node in these}
        candidates = self.space.candidates(name, count)
        return {
            node.name: MemoryStairs.of(chain.from_iterable(node_steps(c, i) for c in candidates))
            for i, node in enumerate(self._groups[name].nodes)
        }

    @memoize
    def _work_stairs(self, name: str, count: int) -> MemoryStairs:
        runs = self._runs(name)
        steps = (group_steps(c, runs) for c in self.space.candidates(name, count))
        return MemoryStairs.of(chain.from_iterable(steps))

    def _runs(self, name: str) -> list[int]:
        """How often each node of a node group runs in a step."""
        return [self.bounds.rounds[node.name] for node in self._groups[name].nodes]

    @memoize
    def _counts(self, name: str, count: int) -> list[int]:
        """On which numbers of devices, at most `count`, a node group can run."""
        return sorted(n for n in self.space.draft.candidates[name] if n <= count)
