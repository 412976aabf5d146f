"""Whether a trainer may free its weights' memory while a reader's copy holds the same values.

HybridFlow's engine generates with weights of which the training shard is a part (arXiv:2409.19256, section
5.3). Here the two are separate tensors, since the optimizer keeps its own: once the copy is there, the
trainer's memory is given back, and before the copy is dropped its values return from it. That needs no
message where each device's part of the copy includes its part of what is trained (`lies_in`), and where
nothing else asks for the trainer's weights meanwhile (`may_donate`).

The program builder decides (`donates`), for every price and for the plan. The planner counts it earlier
(`WeightSyncs.own_copies`), `compiler/memory.py` in the plan. The search counts it only where one node reads
the copy, on exactly the trainer's devices. With several readers, what else runs between the first and the
last of them is known only from the finished order. Of a copy on more devices, only the trainer's get memory
back; but the search has one figure for all devices of a node, and with that its bounds would cut little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from hflow.compiler.state import Draft
from hflow.cost.weight_cells import includes
from hflow.graph.ir import Graph, Node
from hflow.plan.engine_registry import profile_of
from hflow.plan.replicas import Instance
from hflow.plan.sharding import Sharding


def donates(
    draft: Draft, graph: Graph, users: Iterable[tuple[Node, Instance]], source: Instance, copy: Instance
) -> bool:
    """Whether the trainer's weights (`source`) may be freed while this step's `copy` of them exists.

    Args:
        users: the nodes of `graph` with models, and the weights that each uses.
    """
    layers = draft.shapes[source.model].num_layers
    if copy.lag or not lies_in(source.sharding, copy.sharding, layers):
        return False
    of_model = {node.name: own for node, own in users if own.model == source.model}
    if any(own not in (source, copy) for own in of_model.values()):
        return False
    readers = {name for name, own in of_model.items() if own == copy}
    return may_donate(draft, graph, source.model, readers, of_model.keys() - readers)


def lies_in(source: Sharding, copy: Sharding, num_layers: int) -> bool:
    """Whether both are on one engine that donates, and on each device of the trainer the copy includes what
    is trained there."""
    if copy.engine != source.engine or not profile_of(source.engine).donates:
        return False
    return includes(copy, source, num_layers)


def may_donate(draft: Draft, graph: Graph, model: str, readers: Set[str], others: Collection[str]) -> bool:
    """Whether nothing asks for the weights of `model` that the nodes `others` share with its trainer while
    there is the copy for the nodes `readers`. More of either never make it true."""
    if draft.shapes[model].adapter:  # its copies stay
        return False
    trainers = {e.trainer for e in draft.weight_edges if e.every or e.lag}
    if trainers & {node.name for node in draft.graph.trainers(model)}:
        return False
    return all(_apart(graph, graph.node(name), readers) for name in others)


def _apart(graph: Graph, node: Node, readers: Set[str]) -> bool:
    """Whether a node is before all readers, or after all of them, in any order of the nodes. In one region it
    is neither: all its nodes run in every round, and the copy is there for all rounds."""
    regions = {graph.node(reader).region for reader in readers}
    if node.region != graph.regions[0].name and node.region in regions:
        return False
    before = graph.ancestors
    return before[node.name] >= readers or all(node.name in before[reader] for reader in readers)
