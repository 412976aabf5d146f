"""What is known of an allocation before its assignments are chosen: what each node group does at best, and
bounds of choices of which some assignments are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hflow.compiler.candidates.node_groups import GroupRole, NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.assignment_tables import AssignmentTables
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.model_fronts import TimedAssignment
from hflow.compiler.planner.bounds.numbers import Floats, Ints
from hflow.compiler.planner.effort import BATCH, CHOICES, LONGER, ROOM
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.partial_assignment import PartialAssignment
from hflow.compiler.planner.placements import Allocation

FIRST: tuple[GroupRole, ...] = ("train", "generate", "score", "frozen")  # what decides most is chosen first


class BoundContext:
    """What holds for every choice of one allocation.

    `free`: bytes left on each set of devices if every node group keeps as little as it can. `places`: the
    possible assignments of each node group, with their nodes' least times. `times`: the least of each node.
    `on`: the sets of devices of each node. `order`: in which node groups are assigned.
    """

    def __init__(self, allocation: Allocation, best: Incumbent, bounds: Bounds):
        self.best, self.bounds, self.space = best, bounds, best.space
        self.capacity, self.weight_sync = self.space.capacity, self.space.weight_syncs.of
        assignments = self.space.assignments(allocation)
        self.resources = {name: each[0].resources if each else () for name, each in assignments.items()}
        self.idle = {
            name: min((s.candidate.idle_bytes for s in each), default=0) for name, each in assignments.items()
        }
        self.free = dict.fromkeys((r for each in self.resources.values() for r in each), self.capacity)
        for name, size in self.idle.items():
            for resource in self.resources[name]:
                self.free[resource] -= size
        self.free_memory = np.array(list(self.free.values()), dtype=np.int64)
        self.idles = {n: self._on_sets(size, self.resources[n]) for n, size in self.idle.items()}
        self.places = {name: self._places(name, each) for name, each in assignments.items()}
        self.order = sorted(self.space.groups, key=self._rank)
        self.on = {n.name: self.resources[g.name] for g in self.order for n in g.nodes}
        steps = max(
            (len(w.configs) for each in assignments.values() for s in each for w in s.candidate.fronts),
            default=1,
        )
        self.tables = AssignmentTables(
            self.space.groups, self.on, tuple(self.free), steps, bounds, self.space.sharing
        )
        self.times = {
            node.name: min((p.times[i] for p in self.places[group.name]), default=float("inf"))
            for group in self.order
            for i, node in enumerate(group.nodes)
        }

    def models(self) -> list[list[NodeGroup]]:
        """The node groups of each model."""
        models = dict.fromkeys(group.model for group in self.order)
        return [[g for g in self.order if g.model == model] for model in models]

    def longer(self, chosen: PartialAssignment, group: NodeGroup) -> list[PartialAssignment]:
        """With each of the assignments of `group` taken too, that go with the chosen ones."""
        self.best.effort += LONGER
        places = (place.assignment for place in self.places[group.name])
        if any(group.name in names for names in self.space.sharing):
            taken = chosen.assignments
            places = (own for own in places if self.space.lie_alike({**taken, group.name: own}))
        return [self.with_assignment(chosen, group, own) for own in places]

    def with_assignment(
        self, chosen: PartialAssignment, group: NodeGroup, assignment: Assignment
    ) -> PartialAssignment:
        """`assignment` taken too. A reader whose weights lie elsewhere than the trainer's gets its own
        copy."""
        assignments = {**chosen.assignments, group.name: assignment}
        kin = [g for g in self.order if g.model == group.model and g.name in assignments]
        copies = {**chosen.copies, **self.space.weight_syncs.own_copies(kin, assignments)}
        new = self.weight_sync(group, assignment, chosen.assignments)
        if new is None or new.copy in chosen.renewed:
            return PartialAssignment(assignments, copies, chosen.moves, chosen.renewed)
        moves = {**chosen.moves, new.reader: new.seconds}
        return PartialAssignment(assignments, copies, moves, chosen.renewed | {new.copy})

    def bounds_s(self, choices: Sequence[PartialAssignment], enough_s: float | None = None) -> Floats:
        """Of each, with the fastest assignments for all other node groups; infinite where the memory does not
        suffice. The choices are for the same node groups."""
        if not choices:
            return np.zeros(0)
        self.best.effort += ROOM
        table = self.tables.of(choices)
        groups = list(choices[0].assignments)
        least = sum(self.idles[name] for name in groups)
        seconds, fits = table.times_in(self.free_memory + least - table.idle, np.arange(len(choices)))
        bounds_s, some = np.full(len(choices), np.inf), np.flatnonzero(fits)
        if some.size:
            times = dict(zip(table.nodes, seconds[some].T))
            rest = {n: np.full(some.shape, self.times[n]) for n in self.bounds.nodes if n not in times}
            moves = dict(zip(table.readers, table.moves[some].T))
            bounds_s[some] = self.steps_s({**times, **rest}, moves, enough_s)
        return bounds_s

    def steps_s(
        self, times: Mapping[str, Floats], moves: Mapping[str, Floats], enough_s: float | None = None
    ) -> Floats:
        """The bounds of choices whose nodes take `times` and whose weights take `moves`."""
        self.best.effort += BATCH + len(times[self.bounds.nodes[0]]) // CHOICES
        return self.bounds.steps_s(times, self.on, moves, enough_s or self.best.limit_s, depth=0)

    def _on_sets(self, size: int, on: Sequence[int]) -> Ints:
        return np.array([size if resource in on else 0 for resource in self.free], dtype=np.int64)

    def _rank(self, group: NodeGroup) -> tuple[int, float]:
        places = self.places[group.name]
        return FIRST.index(group.role), -min((sum(p.times) for p in places), default=0.0)

    def _places(self, name: str, assignments: Sequence[Assignment]) -> list[TimedAssignment]:
        """The assignments in which every node of the node group can run, the fastest first."""
        found: list[TimedAssignment] = []
        for assignment in assignments:
            limit = (
                min(self.free[r] for r in assignment.resources)
                + self.idle[name]
                - assignment.candidate.idle_bytes
            )
            configs = [each.fastest(limit) for each in assignment.candidate.fronts]
            if all(configs):
                found.append(
                    TimedAssignment(
                        assignment, tuple(w.time_s + assignment.candidate.swap_s for w in configs if w)
                    )
                )
        return sorted(found, key=lambda place: sum(place.times))
