"""Weights that come to a reader from its trainer, because its devices hold them in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.donation import lies_in, may_donate
from hflow.compiler.planner.assignments import Assignment, Assignments, sharding_of
from hflow.compiler.planner.effort import DEVICES, EXPERTS, MOVE
from hflow.compiler.planner.unused_hosts import unused_before
from hflow.compiler.state import Draft
from hflow.cost.redistribution import waking_s, weights_s
from hflow.cost.residency import SHARED, OwnCopy
from hflow.graph.evaluation import named_graph
from hflow.graph.ir import Graph, step_node
from hflow.plan.sharding import Sharding

# Of a model: how and where it lies, its lag, whether in flight.
WeightCopy = tuple[str, Sharding, int, int, bool]


@dataclass(frozen=True)
class WeightSync:
    """`reader`: the first node of the node group that reads. `lies`: how, as if device `first` were the first
    of all. `seconds`: of the transfer, and until a server that slept is awake. `own`: whether its copy of the
    newest weights is its own; on the same devices their trainer's memory, of `donated_bytes`, may be donated
    to it."""

    reader: str
    group: NodeGroup
    lies: Sharding
    first: int
    seconds: float
    own: bool
    donated_bytes: int

    @cached_property
    def copy(self) -> WeightCopy:
        """Readers of equal copies share one."""
        return self.group.model, self.lies, self.first, self.group.lag, self.group.nodes[0].in_flight


class WeightSyncs:
    """Those of one draft, each found out once, as if there were no unused hosts before or between trainer and
    reader. `effort`: what that took, by `effort.py`."""

    def __init__(self, draft: Draft, groups: Sequence[NodeGroup]):
        self.draft, self.group_of = draft, {node.name: g.name for g in groups for node in g.nodes}
        edges = [e for e in self.draft.weight_edges if not e.every]
        edges = [e for e in edges if self.group_of[e.reader] != self.group_of[e.trainer]]
        self._edges = {
            g.name: next((e for e in edges if self.group_of[e.reader] == g.name), None) for g in groups
        }
        self._known: dict[object, WeightSync | None] = {}
        self._of_first: dict[object, WeightSync | None] = {}
        self._pairs: set[tuple[str, Sharding, Sharding]] = set()
        self.effort = 0
        self._assignments: dict[tuple[Candidate, int], Assignment] = {}
        self._graphs = [graph for graph in (self.draft.graph, self.draft.evaluation_graph) if graph]
        self._graphs += [named_graph(draft.graph, named) for named in draft.graph.evaluations]
        self._donating: dict[tuple[str, ...], bool] = {}
        self._meanwhile = {group.name: _meanwhile(self.draft.graph, group) for group in groups}

    def of(self, group: NodeGroup, assignment: Assignment, assignments: Assignments) -> WeightSync | None:
        """How the weights of a node group in `assignment` are renewed from its trainer, one of those with
        `assignments`; None where they lie there."""
        edge = self._edges[group.name]
        if edge is None:
            return None
        trainer = assignments[self.group_of[edge.trainer]]
        candidates = assignment.candidate, trainer.candidate
        key = edge.reader, *candidates, assignment.devices[0], trainer.devices[0]
        if key not in self._known:
            self._known[key] = self._weight_sync(group, assignment, trainer, edge.reader)
        return self._known[key]

    def trainer_of(self, group: NodeGroup) -> str | None:
        """The node group whose weights it reads."""
        edge = self._edges[group.name]
        return self.group_of[edge.trainer] if edge else None

    def own_copies(self, groups: Sequence[NodeGroup], assignments: Assignments) -> dict[str, OwnCopy]:
        """By name of `groups`, those of some models that have assignments. A copy that several share counts
        for the first. With more node groups of the same models none takes less."""
        found = dict.fromkeys((group.name for group in groups), SHARED)
        for model in dict.fromkeys(group.model for group in groups if group.use == "read"):
            found |= self._of_model([group for group in groups if group.model == model], assignments)
        return found

    def _of_model(self, groups: Sequence[NodeGroup], assignments: Assignments) -> dict[str, OwnCopy]:
        readers: dict[WeightCopy, list[tuple[NodeGroup, WeightSync]]] = {}
        for group in groups:
            sync = self.of(group, assignments[group.name], assignments)
            if sync and sync.own:
                readers.setdefault(sync.copy, []).append((group, sync))
        found: dict[str, OwnCopy] = {}
        for same in readers.values():
            (first, sync), nodes = same[0], self.num_meanwhile(*(group for group, _ in same))
            donates = (
                len(readers) == 1 and nodes == 1 and sync.donated_bytes and self.may_donate(first, groups)
            )
            kept = assignments[first.name].candidate.kept
            found[first.name] = kept.own_copy(nodes, sync.donated_bytes if donates else 0)
        return found

    def num_meanwhile(self, *readers: NodeGroup) -> int:
        """How many nodes with models run while there is a copy of weights for some node groups: their own,
        and whatever runs in the rounds of the same region."""
        return len(frozenset[str]().union(*(self._meanwhile[group.name] for group in readers)))

    def may_donate(self, reader: NodeGroup, groups: Sequence[NodeGroup]) -> bool:
        """Whether a copy that `reader` alone of some node groups has may be donated its trainer's memory, as
        far as the graphs of step and evaluations say."""
        names = reader.name, *(group.name for group in groups)
        if names not in self._donating:
            self._donating[names] = all(self._may_donate(graph, reader, groups) for graph in self._graphs)
        return self._donating[names]

    def _may_donate(self, graph: Graph, reader: NodeGroup, groups: Sequence[NodeGroup]) -> bool:
        there = {step_node(node.name): node.name for node in graph.nodes}
        nodes = {there[node.name] for group in groups for node in group.nodes if node.name in there}
        readers = {there[node.name] for node in reader.nodes if node.name in there}
        return may_donate(self.draft, graph, reader.model, readers, nodes - readers)

    def _weight_sync(
        self, group: NodeGroup, assignment: Assignment, trainer: Assignment, reader: str
    ) -> WeightSync | None:
        before, of_trainer = unused_before(self.draft.cluster, (assignment.devices, trainer.devices))
        candidates = assignment.candidate, trainer.candidate
        key = reader, *candidates, assignment.devices[0] - before, trainer.devices[0] - of_trainer
        if key not in self._of_first:
            moved = self._moved(assignment, before), self._moved(trainer, of_trainer)
            self._of_first[key] = self._on_first(group, *moved, reader)
        found = self._of_first[key]
        return replace(found, first=before) if found and before else found

    def _on_first(
        self, group: NodeGroup, assignment: Assignment, trainer: Assignment, reader: str
    ) -> WeightSync | None:
        held, lies = trainer.candidate.sharding(trainer.mesh), sharding_of(group, assignment, trainer)
        if lies == held and not group.lag:
            return None
        draft = self.draft
        model, layers = draft.graph.model(group.model), draft.shapes[group.model].num_layers
        seconds = 0.0  # a base never changes
        if not group.base:
            self._count(group.model, held, lies)
            changed = draft.graph.node(reader).model_use.delta_weights
            shape, dtype = draft.shapes[group.model], model.weight_dtype
            seconds = weights_s(shape, dtype, held, lies, draft.cluster, changed)
            seconds += waking_s(shape, dtype, lies.engine, group.lag, draft.cluster)
        own = lies != held and assignment.candidate.kept.copy_bytes > 0
        alike = {*lies.mesh.devices} == {*held.mesh.devices} and lies_in(held, lies, layers)
        donated_bytes = trainer.candidate.kept.weights if own and not group.lag and alike else 0
        return WeightSync(reader, group, lies, 0, seconds, own, donated_bytes)

    def _count(self, model: str, held: Sharding, lies: Sharding) -> None:
        if (model, held, lies) in self._pairs:
            return
        self._pairs.add((model, held, lies))
        self.effort += MOVE + self.draft.cluster.num_devices // DEVICES
        if self.draft.shapes[model].moe:
            self.effort += EXPERTS

    def _moved(self, assignment: Assignment, first: int) -> Assignment:
        """As if device `first` were the first of all."""
        key = assignment.candidate, assignment.devices[0] - first
        if key not in self._assignments:
            self._assignments[key] = replace(
                assignment, devices=tuple(device - first for device in assignment.devices)
            )
        return self._assignments[key]


def _meanwhile(graph: Graph, group: NodeGroup) -> frozenset[str]:
    regions = {node.region for node in group.nodes} - {graph.regions[0].name}
    beside = {node.name for node in graph.nodes if node.model and node.region in regions}
    return frozenset(beside | {node.name for node in group.nodes})
