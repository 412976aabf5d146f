"""The layouts in which ops produce and consume their ports: hflow's counterpart of transfer protocols.

Rows are split over ``dp`` in whole groups (the samples of one prompt stay together) and present on
every tensor-parallel rank. Only generation may split the samples of a prompt over neighbouring replicas, each
of which then reads that prompt. What a model computes appears on its last pipeline stage; what it reads
is needed on every stage. Scalars, and whatever a node that works on whole batches reads or makes, lie
on all devices of the node's mesh, and so does what a data node reads of earlier steps.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hflow.graph.ir import Node
from hflow.graph.types import ValueType
from hflow.plan.layout import Layout, Mesh, Only, Placement, Replicate, Shard, SharedShard

REPEATED = Replicate()


def row_unit(type_: ValueType) -> int:
    """Rows that must stay together: the samples of one prompt."""
    sizes = [f.size or 1 for f in type_.dims[0].factors]
    return prod(sizes[1:])


def num_groups(type_: ValueType) -> int:
    """Of rows that must stay together."""
    return type_.rows // row_unit(type_)


def is_replicated(node: Node) -> bool:
    """Whether each device of the node's mesh sees all rows and does the same with them."""
    return node.op == "repeat" or bool(node.op == "call" and node.function and node.function.whole_batch)


def input_layout(node: Node, mesh: Mesh, type_: ValueType) -> Layout:
    """How `node`, running on `mesh`, reads a value of `type_`."""
    return _layout(mesh, REPEATED if node.op == "data" else _over_dp(node, mesh, type_))


def output_layout(node: Node, mesh: Mesh, type_: ValueType) -> Layout:
    """How a value of `type_` lies when `node` has made it on `mesh`."""
    return _layout(mesh, _over_dp(node, mesh, type_), node.op == "score")


def generates_evenly(node: Node, dp: int) -> bool:
    """Whether each of `dp` replicas makes equally many rows of a generate node: all samples of some prompts,
    or some of one."""
    made = node.type_of("tokens")
    groups = num_groups(made)
    if dp <= groups or dp % groups:
        return groups % dp == 0
    prompt = node.input("prompt")
    whole = isinstance(_part(row_unit(made), dp // groups), Shard)
    return whole and (prompt is None or _part(row_unit(prompt.type), dp // groups) is not None)


def _over_dp(node: Node, mesh: Mesh, type_: ValueType) -> Placement:
    if type_.scalar or is_replicated(node):
        return REPEATED
    unit, groups = row_unit(type_), num_groups(type_)
    if node.op != "generate" or mesh.dp <= groups:
        return Shard(0, unit)
    part = _part(unit, mesh.dp // groups)
    assert part, (node.name, mesh)
    return part


def _part(unit: int, replicas: int) -> Shard | SharedShard | None:
    """How as many `replicas` as a group of `unit` rows has share it: each has some rows, or several have the
    same row; None where some would have parts of several."""
    if unit % replicas == 0:
        return Shard(0, unit // replicas)
    return SharedShard(0, 1, replicas // unit) if replicas % unit == 0 else None


@lru_cache(maxsize=65536)
def _layout(mesh: Mesh, over_dp: Placement, last_stage: bool = False) -> Layout:
    """Equal layouts are one object, so that they are quickly told to be equal."""
    over_pp: Placement = Only(mesh.pp - 1) if last_stage else REPEATED
    placements = {"pp": over_pp, "dp": over_dp}
    return Layout(mesh, tuple(placements.get(axis, REPEATED) for axis, _ in mesh.axes))
