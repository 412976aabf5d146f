"""Weights that come to a reader from its trainer, because its devices hold them in another layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.planner.assignments import Assignment, sharding_of
from hflow.compiler.state import Draft
from hflow.cost.redistribution import weights_s
from hflow.plan.sharding import Sharding

# Of a model: how and where it lies, its lag, whether in flight.
WeightCopy = tuple[str, Sharding, int, int, bool]


@dataclass(frozen=True)
class WeightSync:
    """`reader`: the first node of the node group that reads. `lies`: how, as if `first` were the first of
    all. `seconds`: of the transfer."""

    reader: str
    group: NodeGroup
    lies: Sharding
    first: int
    seconds: float
    copy_bytes: int

    @cached_property
    def copy(self) -> WeightCopy:
        """Readers of equal copies share one."""
        return self.group.model, self.lies, self.first, self.group.lag, self.group.nodes[0].in_flight


class WeightSyncs:
    """Those of one draft, each found out once, as if the first host of both were the first of all: hosts are
    alike."""

    def __init__(self, draft: Draft):
        self.draft = draft
        self._known: dict[object, WeightSync | None] = {}
        self._of_first: dict[object, WeightSync | None] = {}
        self._assignments: dict[tuple[Candidate, int], Assignment] = {}

    def of(
        self, group: NodeGroup, assignment: Assignment, trainer: Assignment, reader: str
    ) -> WeightSync | None:
        """None where the weights lie as the reader needs them."""
        key = reader, assignment.candidate, trainer.candidate, assignment.devices[0], trainer.devices[0]
        if key not in self._known:
            self._known[key] = self._weight_sync(group, assignment, trainer, reader)
        return self._known[key]

    def _weight_sync(
        self, group: NodeGroup, assignment: Assignment, trainer: Assignment, reader: str
    ) -> WeightSync | None:
        per_host = self.draft.cluster.devices_per_host
        first = min(assignment.devices[0], trainer.devices[0]) // per_host * per_host
        candidates = assignment.candidate, trainer.candidate
        key = reader, *candidates, assignment.devices[0] - first, trainer.devices[0] - first
        if key not in self._of_first:
            moved = self._moved(assignment, first), self._moved(trainer, first)
            self._of_first[key] = self._on_first(group, *moved, reader)
        found = self._of_first[key]
        return replace(found, first=first) if found and first else found

    def _on_first(
        self, group: NodeGroup, assignment: Assignment, trainer: Assignment, reader: str
    ) -> WeightSync | None:
        held, lies = trainer.candidate.sharding(trainer.mesh), sharding_of(group, assignment, trainer)
        if lies == held and not group.lag:
            return None
        draft = self.draft
        model = draft.graph.model(group.model)
        seconds = weights_s(draft.shapes[group.model], model.dtype, held, lies, draft.cluster)
        copy_bytes = 0 if lies == held else assignment.candidate.kept.copy_bytes
        return WeightSync(reader, group, lies, 0, seconds, copy_bytes)

    def _moved(self, assignment: Assignment, first: int) -> Assignment:
        """As if device `first` were the first of all."""
        key = assignment.candidate, assignment.devices[0] - first
        if key not in self._assignments:
            self._assignments[key] = replace(
                assignment, devices=tuple(device - first for device in assignment.devices)
            )
        return self._assignments[key]
