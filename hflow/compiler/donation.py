"""Whether a trainer may free its weights' memory while a reader's copy holds the same values.

HybridFlow's engine generates with weights of which the training shard is a part (arXiv:2409.19256, section
5.3). Here the two are separate tensors, since the optimizer keeps its own: once the copy is there, the
trainer's memory is given back, and before the copy is dropped its values return from it. That needs no
message where each device's part of the copy includes its part of what is trained, and where nothing else asks
for the trainer's weights meanwhile. `lower_edges` asks this and `memory` counts it; the planner does not, so
it may pass over a plan that fits only for this reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from hflow.compiler.state import Draft
from hflow.cost.redistribution import includes
from hflow.graph.ir import Graph, Node
from hflow.plan.engine_registry import profile_of
from hflow.plan.replicas import Instance, instance_of


def donates(draft: Draft, graph: Graph, order: Sequence[Node], source: Instance, copy: Instance) -> bool:
    """Whether the trainer's weights (`source`) may be freed while this step's `copy` of them exists.

    Args:
        order: of the nodes of `graph` in its program.
    """
    if copy.lag or copy.in_flight or not _lies_in(source, copy):
        return False
    others = (e.trainer for e in draft.weight_edges if e.every or e.lag)
    if copy.model in {model.model for name in others if (model := draft.graph.node(name).model)}:
        return False
    shared = {source, copy}
    uses = [(n, instance_of(n, draft.node_plan(n.name).sharding)) for n in order if n.model]
    of_model = [(node, own) for node, own in uses if own.model == source.model]
    if any(own not in shared for _, own in of_model):
        return False
    readers = [node for node, own in of_model if own == copy]
    trainer = [node for node, own in of_model if own == source]
    return all(_apart(graph, node, readers) for node in trainer)


def _lies_in(source: Instance, copy: Instance) -> bool:
    """Whether on each device of the trainer the copy includes what is trained there."""
    engine = source.sharding.engine
    if copy.sharding.engine != engine or not profile_of(engine).donates:
        return False
    return includes(copy.sharding, source.sharding)


def _apart(graph: Graph, node: Node, readers: Sequence[Node]) -> bool:
    """Whether a node is before all readers, or after all of them, in any order of the nodes. In one region it
    is neither: all its nodes run in every round, and the copy is there for all rounds."""
    if node.region != graph.regions[0].name and any(node.region == reader.region for reader in readers):
        return False
    dag, names = graph.dag(), {reader.name for reader in readers}
    before: set[str] = nx.ancestors(dag, node.name)  # pyright: ignore[reportUnknownMemberType]
    after: set[str] = nx.descendants(dag, node.name)  # pyright: ignore[reportUnknownMemberType]
    return before >= names or after >= names
