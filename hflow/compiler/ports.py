"""The layouts in which ops produce and consume their ports: hflow's counterpart of transfer protocols.

Rows are split over ``dp`` in whole groups (the samples of one prompt stay together) and present on
every tensor-parallel rank. What a model computes appears on its last pipeline stage; what it reads
is needed on every stage.
"""

from __future__ import annotations

from math import prod

from hflow.compiler.layout import Layout, Mesh, Only, Placement, Replicate, Shard
from hflow.graph.graph import Node
from hflow.graph.types import ValueType


def row_unit(type_: ValueType) -> int:
    """Rows that must stay together: the samples of one prompt."""
    sizes = [f.size or 1 for f in type_.dims[0].factors]
    return prod(sizes[1:])


def input_layout(mesh: Mesh, type_: ValueType) -> Layout:
    return _rows(mesh, type_, Replicate())


def output_layout(node: Node, mesh: Mesh, type_: ValueType) -> Layout:
    return _rows(mesh, type_, Only(mesh.pp - 1) if node.op == "score" else Replicate())


def _rows(mesh: Mesh, type_: ValueType, over_pp: Placement) -> Layout:
    placements: dict[str, Placement] = {"pp": over_pp, "dp": Shard(0, row_unit(type_))}
    return Layout(mesh, tuple(placements.get(axis, Replicate()) for axis, _ in mesh.axes))
