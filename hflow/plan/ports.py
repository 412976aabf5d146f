"""The layouts in which ops produce and consume their ports: hflow's counterpart of transfer protocols.

Rows are split over ``dp`` in whole groups (the samples of one prompt stay together) and present on
every tensor-parallel rank. What a model computes appears on its last pipeline stage; what it reads
is needed on every stage. Scalars, and whatever a node that works on whole batches reads or makes, lie
on all devices of the node's mesh, and so does what a data node reads of earlier steps.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hflow.graph.ir import Node
from hflow.graph.types import ValueType
from hflow.plan.layout import Layout, Mesh, Only, Placement, Replicate, Shard


def row_unit(type_: ValueType) -> int:
    """Rows that must stay together: the samples of one prompt."""
    sizes = [f.size or 1 for f in type_.dims[0].factors]
    return prod(sizes[1:])


def is_replicated(node: Node) -> bool:
    """Whether each device of the node's mesh sees all rows and does the same with them."""
    return node.op == "repeat" or bool(node.op == "call" and node.function and node.function.whole_batch)


def input_layout(node: Node, mesh: Mesh, type_: ValueType) -> Layout:
    """How `node`, running on `mesh`, reads a value of `type_`."""
    return _layout(mesh, 0 if node.op == "data" else _split_unit(node, type_))


def output_layout(node: Node, mesh: Mesh, type_: ValueType) -> Layout:
    """How a value of `type_` lies when `node` has made it on `mesh`."""
    return _layout(mesh, _split_unit(node, type_), node.op == "score")


def _split_unit(node: Node, type_: ValueType) -> int:
    """Rows that stay together when they are split over ``dp``; 0 where they are not."""
    return 0 if type_.scalar or is_replicated(node) else row_unit(type_)


@lru_cache(maxsize=65536)
def _layout(mesh: Mesh, unit: int, last_stage: bool = False) -> Layout:
    """Equal layouts are one object, so that they are quickly told to be equal."""
    over_pp: Placement = Only(mesh.pp - 1) if last_stage else Replicate()
    placements = {"pp": over_pp, "dp": Shard(0, unit) if unit else Replicate()}
    return Layout(mesh, tuple(placements.get(axis, Replicate()) for axis, _ in mesh.axes))
