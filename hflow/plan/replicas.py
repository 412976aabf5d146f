"""Copies of models: which weights exist, and which nodes share them.

Nodes of one model that split it alike on one mesh use the same weights, the trainer's where it does so.
A reader on another mesh, or one that samples with older weights, has its own, renewed over its weight edge;
so do those whose weights are renewed in flight, since others begin with the weights of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.graph.ir import Graph, Node
from hflow.plan.layout import Mesh
from hflow.plan.sharding import Sharding


@dataclass(frozen=True)
class Instance:
    """One copy of a model's weights. `lag`: how many training steps it is behind the trainer. `in_flight`: it
    begins its node with the weights of the step before, and is renewed while the node generates."""

    model: str
    sharding: Sharding
    lag: int = 0
    in_flight: bool = False

    @property
    def mesh(self) -> Mesh:
        return self.sharding.mesh


def instance_of(node: Node, sharding: Sharding) -> Instance:
    """The weights that a node uses which splits them so."""
    use = node.model_use
    return Instance(use.model, sharding, use.lag, node.in_flight)


def instances(graphs: Iterable[Graph], shardings: Mapping[str, Sharding]) -> dict[Instance, Node | None]:
    """Every instance that the nodes of `graphs` (a graph and its evaluation) use, with the first node that
    trains it.

    Args:
        shardings: of each node.
    """
    found: dict[Instance, Node | None] = {}
    for node in (n for graph in graphs for n in graph.nodes if n.model):
        instance = instance_of(node, shardings[node.name])
        trainer = node if node.op == "train" else None
        found[instance] = found.get(instance) or trainer
    return found
