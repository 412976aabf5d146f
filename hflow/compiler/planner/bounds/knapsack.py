"""How little time a set of devices needs within its memory: a small knapsack problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hflow.compiler.planner.bounds.assignment_tables import AssignmentTable
from hflow.compiler.planner.bounds.numbers import Floats, Ints

Front = tuple[Ints, Floats]  # rising bytes that stay, falling seconds of work


@dataclass(frozen=True)
class KnapsackBound:
    """What tables still to choose from do at least, on each set of devices. `fronts`: by set, of the last
    tables, all first; `most`: bytes that may stay."""

    fronts: tuple[tuple[Front, ...], ...]
    most: Ints

    @property
    def least_s(self) -> float:
        """When nothing is chosen yet."""
        nothing = np.zeros((1, len(self.most)), dtype=np.int64)
        return float(self.work_s(0, nothing, nothing.astype(np.float64))[0])

    def work_s(self, level: int, idle: Ints, busy: Floats) -> Floats:
        """What the busiest set does at least, infinite where the memory does not suffice: for each choice of
        which the first `level` tables leave `idle` bytes and do `busy` seconds on each set."""
        best = np.zeros(len(idle))
        for number, fronts in enumerate(self.fronts):
            bytes_, seconds = fronts[level]
            free: Ints = self.most[number] - idle[:, number]
            last = bytes_.searchsorted(free, side="right") - 1
            least = np.where(last >= 0, seconds[last], np.inf) if len(bytes_) else np.inf
            best = np.maximum(best, busy[:, number] + least)
        return best


def knapsack_bound(tables: Sequence[AssignmentTable], most: Ints, limit_s: float) -> KnapsackBound:
    """For each set of devices, the least work of the tables still to choose from, by the bytes that stay.
    What needs more than `most` bytes, or `limit_s` or longer, is left out; where nothing is left the bound is
    infinite."""
    fronts: list[tuple[Front, ...]] = []
    each = [(table.idle, table.busy) for table in reversed(tables)]
    for number, size in enumerate(map(int, most)):
        found: list[Front] = [(np.zeros(1, dtype=np.int64), np.zeros(1))]
        for idle, busy in each:
            one = _front(idle[:, number], busy[:, number], size, limit_s)
            found.append(_joined(one, found[-1], size, limit_s))
        fronts.append(tuple(reversed(found)))
    return KnapsackBound(tuple(fronts), most)


def _joined(one: Front, other: Front, most: int, limit_s: float) -> Front:
    idle, busy = (np.add.outer(*each).ravel() for each in zip(one, other))
    return _front(idle, busy, most, limit_s)


def _front(idle: Ints, busy: Floats, most: int, limit_s: float) -> Front:
    few = (idle <= most) & (busy < limit_s)
    idle, busy = idle[few], busy[few]
    order = np.lexsort((busy, idle))
    idle, busy = idle[order], busy[order]
    before = np.minimum.accumulate(np.concatenate([[np.inf], busy[:-1]])) if len(busy) else busy
    better = busy < before
    return idle[better], busy[better]
