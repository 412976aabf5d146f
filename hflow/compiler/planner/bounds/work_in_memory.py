"""How little work a set of devices has in its memory, whatever each node group keeps there.

The less one node group keeps, the more memory the others have to work in; what keeps least is often slow. So
the free memory is parted into intervals, as in `assignment_tables`: in one of them each node works as fast as
in its most, and all together keep no more than its least leaves. What a set does at least in any of them
is a bound; the interval that has the least is halved until the bound is good enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace

import numpy as np

from hflow.compiler.candidates.node_groups import Candidate
from hflow.compiler.planner.bounds.assignment_tables import NEVER
from hflow.compiler.planner.bounds.knapsack import least_work
from hflow.compiler.planner.bounds.memory_stairs import MemoryStairs, group_steps
from hflow.compiler.planner.bounds.numbers import Floats, Ints

HALVINGS = 6  # more take longer than what they cut


@dataclass(frozen=True)
class WorkCurves:
    """Of the candidates (C) of a node group, by the free memory that its nodes may need.

    `idle` [C]: bytes that stay. `starts`, `seconds` [K, C]: from `starts[k]` bytes on, all runs of a step
    take `seconds[k]`; unused steps start at NEVER.
    """

    idle: Ints
    starts: Ints
    seconds: Floats

    @staticmethod
    def of(candidates: Iterable[Candidate], runs: Sequence[int]) -> WorkCurves:
        """Args: `runs`: of each node in a step."""
        known = [(c.idle_bytes, MemoryStairs.of(group_steps(c, runs))) for c in candidates]
        known = [(idle, stairs) for idle, stairs in known if stairs.needs]
        steps = max((len(stairs.needs) for _, stairs in known), default=1)
        starts = np.full((steps, len(known)), NEVER, dtype=np.int64)
        seconds = np.full(starts.shape, np.inf)
        for number, (idle, stairs) in enumerate(known):
            starts[: len(stairs.needs), number] = np.array(stairs.needs, dtype=np.int64) - idle
            seconds[: len(stairs.needs), number] = stairs.seconds
        return WorkCurves(np.array([idle for idle, _ in known], dtype=np.int64), starts, seconds)

    def within(self, free_bytes: int) -> Floats:
        """Infinite where that is too little."""
        return np.where(self.starts <= free_bytes, self.seconds, np.inf).min(axis=0, initial=np.inf)


@dataclass
class WorkInMemory:
    """Of some node groups in `capacity` bytes. `looked_at`: intervals of free memory."""

    curves: Sequence[WorkCurves]
    capacity: int
    looked_at: int = 0

    def least_s(self, limit_s: float) -> float:
        """No choice of candidates does less in a step; or some that is not below `limit_s`."""
        least_s, kept = self._between(0, self.capacity, limit_s)
        left = self.capacity - kept
        if least_s >= limit_s or self._between(left, left, limit_s)[0] == least_s:
            return least_s
        parts = [(least_s, 0, self.capacity)]
        for _ in range(HALVINGS):
            least_s, low, high = parts[0]
            if least_s >= limit_s or low == high:
                break
            middle = (low + high) // 2
            heapreplace(parts, (self._between(low, middle, limit_s)[0], low, middle))
            heappush(parts, (self._between(middle + 1, high, limit_s)[0], middle + 1, high))
        return parts[0][0]

    def _between(self, low: int, high: int, limit_s: float) -> tuple[float, int]:
        """What is done at least with so much free memory, and the bytes that are kept then."""
        self.looked_at += 1
        tables = [(each.idle, each.within(high)) for each in self.curves]
        return least_work(tables, self.capacity - low, limit_s)
