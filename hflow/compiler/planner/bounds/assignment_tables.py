"""The choices for the node groups of one model, in arrays, within limits of the memory that is left free.

The free memory of a set of devices is what all node groups together leave free while no node runs. Most
choices trade memory for time only beyond some free memory: the search tries intervals of it one by one,
and in a narrow one few choices of a table are left that no other beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.candidates.shared_bases import SharedBases
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.numbers import Bools, Floats, Ints, known
from hflow.compiler.planner.bounds.recurrence import Places
from hflow.compiler.planner.partial_assignment import PartialAssignment
from hflow.cost.residency import SHARED, OwnCopy
from hflow.plan.sharding import Sharding

NEVER = np.iinfo(np.int64).max
BLOCK = 256  # choices that are compared with each other at a time


class MemoryInterval(NamedTuple):
    """The least and the most bytes that each set of devices leaves free."""

    low: Ints
    high: Ints

    def halves(self) -> tuple[MemoryInterval, MemoryInterval]:
        """Of the widest interval, the upper one first."""
        widest = np.arange(len(self.low)) == np.argmax(self.high - self.low)
        middle = (self.low + self.high) // 2
        upper = MemoryInterval(np.where(widest, middle + 1, self.low), self.high)
        return upper, MemoryInterval(self.low, np.where(widest, middle, self.high))


@dataclass(frozen=True)
class AssignmentTable:
    """The choices (P) for the node groups of one model, as arrays over their nodes (N), readers (R), the sets
    of devices (S) and the steps (K) of each node's time curve.

    `parts`: the choices. `idle` [P, S]: bytes that stay. `starts`, `seconds` [K, P, N]: from `starts[k]`
    bytes of free memory on, a run of the node takes `seconds[k]`; unused steps start at NEVER. `moves` [P,
    R]: seconds of a weight transfer, NaN where none is needed. `runs` [N, S]: how often a node runs on a set
    in a training step. `joins` [R, S]: 1 where a transfer occupies a set. `unbeaten`: for which sets memory
    counted when dominated choices were last removed; None if they never were. `sharing`: the node groups
    that train models of the same base, if this one shares its base; `lies` [P]: a number for how its trainer
    lies. Parts of two tables with one `sharing` go together where these are equal.
    """

    parts: Sequence[PartialAssignment]
    nodes: tuple[str, ...]
    readers: tuple[str, ...]
    idle: Ints
    starts: Ints
    seconds: Floats
    moves: Floats
    runs: Floats
    joins: Floats
    unbeaten: tuple[bool, ...] | None = None
    sharing: tuple[str, ...] = ()
    lies: Ints | None = None

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def least_s(self) -> Floats:
        """By part and node, with all free memory that there may be."""
        return _at(self.seconds, (self.starts < NEVER).sum(axis=0) - 1)

    @property
    def busy(self) -> Floats:
        """By part and set of devices, the least seconds of work."""
        return self.least_s @ self.runs + known(self.moves) @ self.joins

    def tight(self, interval: MemoryInterval) -> Bools:
        """By set of devices, whether some node on it fits, or is faster, only with more than the least."""
        later = (self.starts > self._free_at_nodes(interval.low)) & (self.starts < NEVER)
        return later.any(axis=(0, 1)) @ (self.runs > 0)

    def times_in(self, free_memory: Ints, numbers: Ints) -> tuple[Floats, Bools]:
        """What the nodes take in parts of such `numbers`, each of which has some bytes of free memory on each
        set of devices; and whether all of them fit."""
        starts, free = self.starts[:, numbers], free_memory[:, self._first_set]
        for node in self._on_several:
            free[:, node] = free_memory[:, self.runs[node] > 0].min(axis=1)
        if len(starts) == 1:
            return self.seconds[0, numbers], (starts[0] <= free).all(axis=1)
        last = (starts <= free).sum(axis=0) - 1
        return _at(self.seconds[:, numbers], np.maximum(last, 0)), (last >= 0).all(axis=1)

    def within(self, interval: MemoryInterval) -> AssignmentTable:
        """The parts for which there is enough free memory, with their steps in it."""
        low, high = map(self._free_at_nodes, interval)
        fits = self.starts <= high
        if np.array_equal(fits, self.starts < NEVER) and (self.starts[0] >= low).all():
            return self
        found = self._of(np.flatnonzero(fits[0].all(axis=1)))
        first = np.maximum((found.starts <= low).sum(axis=0) - 1, 0)  # the steps before it take longer
        count = (found.starts <= high).sum(axis=0) - first
        number = np.arange(int(count.max(initial=1)))[:, None, None]
        step = np.minimum(first + number, len(self.starts) - 1)
        starts, seconds = (np.take_along_axis(each, step, axis=0) for each in (found.starts, found.seconds))
        starts = np.where(number < count, np.maximum(starts, low), NEVER)
        return replace(found, starts=starts, seconds=seconds)

    def undominated(self, scarce: Bools) -> AssignmentTable:
        """The parts that no other beats, if memory counts on `scarce` sets of devices alone. What needs no
        more needs no more in sum, so that in this order none beats an earlier one."""
        if self.unbeaten == tuple(scarce):
            return self
        idle = self.idle[:, scarce].astype(np.float64)
        needs = np.concatenate([self.least_s, known(self.moves), idle], axis=1)
        order = np.argsort(needs.sum(axis=1), kind="stable")
        kept = order[:0]
        for first in range(0, len(order), BLOCK):
            some = order[first : first + BLOCK]
            some = some[~self._beat(needs, kept, some).any(axis=0)]
            among = np.triu(self._beat(needs, some, some), 1)
            kept = np.concatenate([kept, some[~among.any(axis=0)]])
        return replace(self._of(np.sort(kept)), unbeaten=tuple(scarce))

    def _beat(self, needs: Floats, ones: Ints, others: Ints) -> Bools:
        """For each pair, whether the one needs no more, and each of its nodes no longer in any free memory;
        and whether it goes with the same choices of other models."""
        beat = np.ones((len(ones), len(others)), dtype=np.bool_)
        if self.lies is not None:
            beat = self.lies[ones][:, None] == self.lies[others]
        for need in needs.T:
            beat &= need[ones][:, None] <= need[others]
        rows, columns = np.nonzero(beat)
        beat[rows, columns] = self._no_slower(ones[rows], others[columns])
        return beat

    def _no_slower(self, ones: Ints, others: Ints) -> Bools:
        """For each pair, whether the nodes of the one take no longer wherever those of the other fit: where
        each step of the other begins. The least free memory, which comes first, tells most pairs apart."""
        found = np.ones(len(ones), dtype=np.bool_)
        for starts, seconds in zip(self.starts, self.seconds):
            some = np.flatnonzero(found & (starts[others] < NEVER).any(axis=1))
            if not some.size:
                break
            one, start = ones[some], starts[others[some]]
            last = (self.starts[:, one] <= start).sum(axis=0) - 1
            no_longer = _at(self.seconds[:, one], np.maximum(last, 0)) <= seconds[others[some]]
            found[some] = ((start == NEVER) | ((last >= 0) & no_longer)).all(axis=1)
        return found

    def _free_at_nodes(self, free_memory: Ints) -> Ints:
        """Of each node the bytes on that of its sets of devices which has the fewest."""
        return np.where(self.runs > 0, free_memory, NEVER).min(axis=1)

    @cached_property
    def _first_set(self) -> Ints:
        return np.argmax(self.runs > 0, axis=1)

    @cached_property
    def _on_several(self) -> Ints:
        """The nodes on more sets of devices than one."""
        return np.flatnonzero((self.runs > 0).sum(axis=1) > 1)

    def only(self, kept: Bools) -> AssignmentTable:
        """The parts that are `kept`."""
        return self if kept.all() else self._of(np.flatnonzero(kept))

    def _of(self, rows: Ints) -> AssignmentTable:
        return replace(
            self,
            parts=[self.parts[row] for row in rows],
            idle=self.idle[rows],
            starts=self.starts[:, rows],
            seconds=self.seconds[:, rows],
            moves=self.moves[rows],
            unbeaten=None,
            lies=None if self.lies is None else self.lies[rows],
        )


def _at(each: Floats, step: Ints) -> Floats:
    return np.take_along_axis(each, step[None], axis=0)[0]


def undominated(
    tables: Sequence[AssignmentTable], most: Ints, interval: MemoryInterval
) -> list[AssignmentTable]:
    """Of each table the parts that no other beats in `interval`, if `most` bytes may stay on a set of
    devices. Where the largest parts stay within that, and the least free memory is as good as more, memory
    does not count."""
    if not all(map(len, tables)):
        return list(tables)
    scarce = sum(table.idle.max(axis=0) for table in tables) > most
    for table in tables:
        scarce = scarce | table.tight(interval)
    return [table.undominated(scarce) for table in tables]


class AssignmentTables:
    """Makes the tables of one allocation.

    Args:
        groups: all of them. on: the sets of devices that each node is on. sets: all of them. steps: the
        most configurations of a node. sharing: the node groups that train models of one base.
    """

    def __init__(
        self,
        groups: Sequence[NodeGroup],
        on: Places,
        sets: Sequence[int],
        steps: int,
        bounds: Bounds,
        sharing: SharedBases = (),
    ):
        self.sharing, self._layouts = sharing, dict[Sharding, int]()
        self.on, self.bounds, self.sets = on, bounds, list(sets)
        self.nodes = {group.name: [n.name for n in group.nodes] for group in groups}
        self._tables = {group.name: GroupTable(group, self.sets, steps) for group in groups}

    def of(self, parts: Sequence[PartialAssignment]) -> AssignmentTable:
        """Of choices for the same node groups, one at least."""
        nodes = tuple(name for group in parts[0].assignments for name in self.nodes[group])
        readers = tuple(dict.fromkeys(reader for part in parts for reader in part.moves))
        runs = np.array([self._share(self.on[name], self.bounds.rounds[name]) for name in nodes])
        joins = [self._share({*self.on[r], *self.on[self.bounds.trainer_of[r]]}, 1) for r in readers]
        sharing = next((names for names in self.sharing if parts[0].assignments.keys() & names), ())
        starts, seconds, idle = zip(*(self._tables[group].rows(parts) for group in parts[0].assignments))
        return AssignmentTable(
            parts,
            nodes,
            readers,
            reduce(np.add, idle),
            np.concatenate(starts, axis=2),
            np.concatenate(seconds, axis=2),
            np.array([[p.moves.get(r, np.nan) for r in readers] for p in parts]).reshape(len(parts), -1),
            runs,
            np.array(joins).reshape(len(readers), len(self.sets)),
            sharing=sharing,
            lies=self._lies(parts, sharing) if sharing else None,
        )

    def _lies(self, parts: Sequence[PartialAssignment], sharing: tuple[str, ...]) -> Ints:
        """By part, the number of the layout of that one of the node groups `sharing` a base which it has."""
        name = next(name for name in sharing if name in parts[0].assignments)
        layouts = (part.assignments[name].sharding for part in parts)
        return np.array([self._layouts.setdefault(each, len(self._layouts)) for each in layouts])

    def _share(self, on: Sequence[int] | set[int], times: int) -> list[float]:
        return [float(times) if one in on else 0.0 for one in self.sets]


class GroupTable:
    """The assignments of a node group, as far as they were asked for: curves of so many `steps`, and the
    bytes that stay on each of `sets`."""

    def __init__(self, group: NodeGroup, sets: Sequence[int], steps: int):
        self.group, self.sets, self.steps = group, sets, steps
        self._rows: dict[tuple[Assignment, OwnCopy], int] = {}  # of assignments and copies
        self._arrays: tuple[Ints, Floats, Ints] | None = None

    def rows(self, parts: Sequence[PartialAssignment]) -> tuple[Ints, Floats, Ints]:
        """Starts and seconds, by step, part and node; and by part, the bytes that stay."""
        name = self.group.name
        numbers = [self._number(part.assignments[name], part.copies.get(name, SHARED)) for part in parts]
        if self._arrays is None:
            self._arrays = self._filled()
        starts, seconds, idle = self._arrays
        return starts[:, numbers], seconds[:, numbers], idle[numbers]

    def _number(self, assignment: Assignment, copy: OwnCopy) -> int:
        found = self._rows.get((assignment, copy))
        if found is None:
            found = self._rows[assignment, copy] = len(self._rows)
            self._arrays = None
        return found

    def _filled(self) -> tuple[Ints, Floats, Ints]:
        starts = np.full((self.steps, len(self._rows), len(self.group.nodes)), NEVER, dtype=np.int64)
        seconds = np.zeros(starts.shape)
        idle = np.zeros((len(self._rows), len(self.sets)), dtype=np.int64)
        for (assignment, copy), row in self._rows.items():
            idle[row] = [
                assignment.candidate.idle_bytes if one in assignment.resources else 0 for one in self.sets
            ]
            for column, each in enumerate(assignment.candidate.fronts):
                starts[: len(each.configs), row, column] = [
                    copy.with_node(w.need_bytes) for w in each.configs
                ]
                seconds[: len(each.configs), row, column] = [
                    w.time_s + assignment.candidate.swap_s for w in each.configs
                ]
        return starts, seconds, idle
