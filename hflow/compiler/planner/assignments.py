"""Who runs where and how: an assignment for each node group, and the meshes of all nodes that follow from the
assignments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from hflow.compiler.candidates.node_groups import Candidate, NodeGroup
from hflow.compiler.regroup import generation_mesh
from hflow.graph.ir import Graph, Input, Node
from hflow.plan.cached_hash import CachedHash
from hflow.plan.layout import Mesh
from hflow.plan.ports import is_replicated, num_groups
from hflow.plan.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment(CachedHash):
    """A node group's candidate on devices of the cluster. `resources`: the sets of devices, numbered by the
    planner, that no other node can use meanwhile."""

    candidate: Candidate
    devices: tuple[int, ...]
    resources: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.candidate, self.devices[:1], self.resources))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    @property
    def mesh(self) -> Mesh:
        c = self.candidate
        return _mesh(self.devices[: c.num_devices], c.pp, c.dp, c.cp, c.tp)

    @property
    def sharding(self) -> Sharding:
        """As `sharding_of` says it where nothing is regrouped."""
        return self.candidate.sharding(self.mesh)


Assignments = Mapping[str, Assignment]  # by node group


@lru_cache(maxsize=65536)
def _mesh(devices: tuple[int, ...], pp: int, dp: int, cp: int, tp: int) -> Mesh:
    return Mesh.of(devices, pp=pp, dp=dp, cp=cp, tp=tp)


@lru_cache(maxsize=65536)
def _joined(mesh: Mesh, neighbours: int) -> Mesh:
    return mesh.joined(neighbours)


@lru_cache(maxsize=65536)
def _regrouped(train: Mesh, generate: Mesh) -> Mesh:
    """HybridFlow's grouping, where the meshes are of the same devices and their sizes nest."""
    if train.devices[0] != generate.devices[0] or set(train.devices) != set(generate.devices):
        return generate
    return generation_mesh(train, generate.tp) or generate


def sharding_of(group: NodeGroup, assignment: Assignment, trainer: Assignment | None) -> Sharding:
    """How a node group's weights lie; a generation mesh is regrouped for the `trainer` of its model."""
    regroups = group.role == "generate" and trainer
    mesh = _regrouped(trainer.mesh, assignment.mesh) if regroups and trainer else assignment.mesh
    return assignment.candidate.sharding(mesh)


def shardings(groups: tuple[NodeGroup, ...], assignments: Assignments) -> dict[str, Sharding]:
    """How the weights of all node groups lie."""
    trains = {u.model: assignments[u.name] for u in groups if u.role == "train"}
    return {u.name: sharding_of(u, assignments[u.name], trains.get(u.model)) for u in groups}


def all_meshes(graph: Graph, placed: Mapping[str, Mesh]) -> dict[str, Mesh]:
    """The mesh of every node, from those of the nodes with models."""
    meshes = dict(placed)
    for node in (n for n in graph.nodes if not n.model):
        meshes[node.name] = _with_whole_groups(node, _mesh_of_values(graph, node, meshes))
    return meshes


def _with_whole_groups(node: Node, mesh: Mesh) -> Mesh:
    """Where several replicas generate the samples of one prompt, they are one to a node without a model."""
    rows = next((v.type for v in (*node.outputs, *node.inputs) if not v.type.scalar), None)
    if rows is None or is_replicated(node):
        return mesh
    groups = num_groups(rows)
    return _joined(mesh, mesh.dp // groups) if mesh.dp > groups and mesh.dp % groups == 0 else mesh


def _mesh_of_values(graph: Graph, node: Node, meshes: Mapping[str, Mesh]) -> Mesh:
    """Where a node without a model runs: a region's own node on all devices of the region, a call where
    its first input is made, a data node where its first output is read."""
    if node.op == "repeat":
        devices = sorted({d for inner in graph.inside(node.name) for d in meshes[inner.name].devices})
        return _mesh(tuple(devices), 1, len(devices), 1, 1)
    makers = [maker(graph, value) for value in node.inputs if not value.lag]
    return meshes[makers[0]] if makers else first_consumer(graph, node, meshes)


def maker(graph: Graph, value: Input) -> str:
    """The node that made a value; for one that left a region, the node inside."""
    producer = graph.node(value.source.node)
    inner = producer.input(value.source.port) if producer.op == "repeat" else None
    return inner.source.node if inner else producer.name


def first_consumer(graph: Graph, node: Node, meshes: Mapping[str, T]) -> T:
    """The mesh of the first placed node that reads from `node`, directly or through calls."""
    for consumer, value in graph.edges():
        if value.source.node == node.name and not value.lag:
            return meshes.get(consumer.name) or first_consumer(graph, consumer, meshes)
    return next(iter(meshes.values()))
