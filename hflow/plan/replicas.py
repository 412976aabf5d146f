"""Copies of models: which weights exist, and which nodes share them.

Nodes of one model that split it alike on one mesh use the same weights, the trainer's where it does so.
A reader on another mesh, or one that samples with older weights, has its own, renewed over its weight edge;
so do those whose weights are renewed in flight, since others begin with the weights of the step before.

A server that samples with older weights also evaluates the newest: evaluations come between steps, when it
has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hflow.graph.ir import Graph, Node
from hflow.plan.engine_registry import profile_of
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


def shared_server(own: Instance, of_step: Collection[Instance]) -> Instance | None:
    """The instance with older weights whose server evaluates those of `own`, too, if there is one.

    Args:
        of_step: the instances that nodes of the step use. One of them has a server of its own.
    """
    if own in of_step or profile_of(own.sharding.engine).server is None:
        return None
    older = (i for i in of_step if (i.model, i.sharding) == (own.model, own.sharding) and i.lag)
    return next(older, None)
