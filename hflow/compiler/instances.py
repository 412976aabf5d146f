"""Copies of models: which weights exist, and which nodes share them.

Nodes of one model on one mesh use the same weights, the trainer's where it runs there. A reader on
another mesh, or one that samples with older weights, has its own, renewed over its weight edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.compiler.layout import Mesh
from hflow.graph.graph import Graph, Node


@dataclass(frozen=True)
class Instance:
    """One copy of a model's weights, `lag` updates old, spread over `mesh`."""

    model: str
    mesh: Mesh
    lag: int = 0


def instance_of(node: Node, mesh: Mesh) -> Instance:
    """The weights that a node uses when it runs on `mesh`."""
    assert node.model
    return Instance(node.model.model, mesh, node.model.lag)


def instances(graphs: Iterable[Graph], meshes: Mapping[str, Mesh]) -> dict[Instance, Node | None]:
    """Every instance that the nodes of `graphs` (a graph and its evaluation) use, with the first node that
    trains it.

    Args:
        meshes: where each node runs.
    """
    found: dict[Instance, Node | None] = {}
    for node in (n for graph in graphs for n in graph.nodes if n.model):
        instance = instance_of(node, meshes[node.name])
        trainer = node if node.op == "train" else None
        found[instance] = found.get(instance) or trainer
    return found
