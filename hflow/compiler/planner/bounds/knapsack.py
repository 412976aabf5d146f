"""How little time a set of devices needs within its memory: a small knapsack problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
            least_s = _least_s(fronts[level], self.most[number] - idle[:, number])
            best = np.maximum(best, busy[:, number] + least_s)
        return best


def knapsack_bound(tables: Sequence[AssignmentTable], most: Ints, limit_s: float) -> KnapsackBound:
    """For each set of devices, the least work of the tables still to choose from, by the bytes that stay.
    What needs more than `most` bytes, or `limit_s` or longer, is left out; where nothing is left the bound is
    infinite."""
    fronts: list[tuple[Front, ...]] = []
    each = [(table.idle, table.busy) for table in reversed(tables)]
    for number, size in enumerate(map(int, most)):
        found = _of_first(_on_set(each, number, size, limit_s), size, limit_s)
        fronts.append(tuple(reversed(found)))
    return KnapsackBound(tuple(fronts), most)


def within_limit(tables: Sequence[AssignmentTable], most: Ints, limit_s: float) -> list[AssignmentTable]:
    """Of each table the parts with which every set of devices may do its work in less than `limit_s`, with
    the least work of the other tables in the memory that a part leaves of `most`."""
    every = [(table.idle, table.busy) for table in tables]
    kept = [np.ones(len(table), dtype=np.bool_) for table in tables]
    for number, size in enumerate(map(int, most)):
        own = _on_set(every, number, size, limit_s)
        first, last = _of_first(own, size, limit_s), _of_first(own[::-1], size, limit_s)[-2::-1]
        for parts, (idle, busy), before, after in zip(kept, every, first, last):
            others = _joined(before, after, size, limit_s)
            parts &= busy[:, number] + _least_s(others, size - idle[:, number]) < limit_s
    return [table.only(parts) for table, parts in zip(tables, kept)]


def least_work(tables: Sequence[tuple[Ints, Floats]], most: int, limit_s: float) -> tuple[float, int]:
    """The least seconds of work of one choice of each table, if all keep `most` bytes at most, and the bytes
    that they keep. Infinite seconds where there is nothing below `limit_s`.

    Args:
        tables: bytes and seconds of each choice.
    """
    fronts = [_front(idle, busy, most, limit_s) for idle, busy in tables]
    bytes_, seconds = _of_first(fronts, most, limit_s)[-1]
    return (float(seconds[-1]), int(bytes_[-1])) if len(seconds) else (np.inf, 0)


def _of_first(fronts: Sequence[Front], most: int, limit_s: float) -> list[Front]:
    """Those of none of some tables, of the first, of the first two, and so on."""
    nothing = np.zeros(1, dtype=np.int64), np.zeros(1)
    return list(accumulate(fronts, lambda all_, one: _joined(one, all_, most, limit_s), initial=nothing))


def _on_set(tables: Sequence[tuple[Ints, Floats]], number: int, most: int, limit_s: float) -> list[Front]:
    """Of each table what it keeps and does on one set of devices."""
    return [_front(idle[:, number], busy[:, number], most, limit_s) for idle, busy in tables]


def _least_s(front: Front, free: Ints) -> Floats:
    """The least work of what stays in so many bytes; infinite where nothing does."""
    bytes_, seconds = front
    last = bytes_.searchsorted(free, side="right")
    return np.concatenate([[np.inf], seconds])[last]


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
