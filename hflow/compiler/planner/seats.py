"""Who runs where and how: a seat for each unit, and the meshes of all nodes that follow from the seats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from hflow.compiler.candidates.node_groups import Option, Unit
from hflow.compiler.regroup import generation_mesh
from hflow.graph.ir import Graph, Input, Node
from hflow.plan.layout import Mesh
from hflow.plan.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True)
class Seat:
    """A unit's option on devices of the cluster. `resources`: the sets of devices, numbered by the planner,
    that no other node can use meanwhile."""

    option: Option
    devices: tuple[int, ...]
    resources: tuple[int, ...]

    @property
    def mesh(self) -> Mesh:
        o = self.option
        return _mesh(self.devices[: o.num_devices], o.pp, o.dp, o.tp)


Seats = Mapping[str, Seat]  # by unit


@lru_cache(maxsize=65536)
def _mesh(devices: tuple[int, ...], pp: int, dp: int, tp: int) -> Mesh:
    return Mesh.of(devices, pp=pp, dp=dp, tp=tp)


@lru_cache(maxsize=65536)
def _regrouped(train: Mesh, generate: Mesh) -> Mesh:
    """HybridFlow's grouping, where the meshes are of the same devices and their sizes nest."""
    if train.devices[0] != generate.devices[0] or set(train.devices) != set(generate.devices):
        return generate
    return generation_mesh(train, generate.tp) or generate


def sharding_of(unit: Unit, seat: Seat, trainer: Seat | None) -> Sharding:
    """How a unit's weights lie; a generation mesh is regrouped for the `trainer` of its model."""
    regroups = unit.role == "generate" and trainer
    mesh = _regrouped(trainer.mesh, seat.mesh) if regroups and trainer else seat.mesh
    return seat.option.sharding(mesh)


def shardings(units: tuple[Unit, ...], seats: Seats) -> dict[str, Sharding]:
    """How the weights of all units lie."""
    trains = {u.model: seats[u.name] for u in units if u.role == "train"}
    return {u.name: sharding_of(u, seats[u.name], trains.get(u.model)) for u in units}


def all_meshes(graph: Graph, placed: Mapping[str, Mesh]) -> dict[str, Mesh]:
    """The mesh of every node, from those of the nodes with models."""
    meshes = dict(placed)
    for node in (n for n in graph.nodes if not n.model):
        meshes[node.name] = _mesh_of_values(graph, node, meshes)
    return meshes


def _mesh_of_values(graph: Graph, node: Node, meshes: Mapping[str, Mesh]) -> Mesh:
    """Where a node without a model runs: a region's own node on all devices of the region, a call where
    its first input is made, a data node where its first output is read."""
    if node.op == "repeat":
        devices = sorted({d for inner in graph.inside(node.name) for d in meshes[inner.name].devices})
        return _mesh(tuple(devices), 1, len(devices), 1)
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
