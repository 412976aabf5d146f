"""Transfers between real processes: every rank ends up with the rows (or weights) its layout says."""

from __future__ import annotations

import random

import pytest
import torch

from hflow.compiler.cluster import Cluster, DeviceKind, Link
from hflow.compiler.layout import Layout, Mesh, Only, Replicate, Shard
from hflow.compiler.lowering import data_edge, weight_edge
from hflow.compiler.plan import EdgePlan
from hflow.compiler.shape import ModelShape
from hflow.compiler.sharding import Sharding
from hflow.compiler.weights import parameters, weight_boxes
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.rows import Rows, from_strings
from hflow.runtime.worker.transfer import Peers, move_rows, move_weights
from hflow.runtime.worker.world import World
from tests.engines.processes import Pool

LINK = Link(1e9, 1e-4)
CLUSTER = Cluster("test", DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4), 2, 2, LINK, LINK)
NUM_ROWS = 14
ROWS = Dim((Factor("batch", NUM_ROWS, "prompts"),))
TYPES = (
    ValueType("i32", (ROWS, Dim((Factor("seq", 9, "prompts"),), True))),
    ValueType("str", (ROWS,)),
    ValueType("f32", (ROWS,)),
    ValueType("bool", (ROWS, Dim((Factor("resp", 9, "prompts"),), True))),
)
PORTS = ("tokens", "text", "score", "mask")

LAYOUTS = {
    "dp4": Layout(Mesh((0, 1, 2, 3), (("dp", 4),)), (Shard(0),)),
    "dp4 reversed": Layout(Mesh((3, 2, 1, 0), (("dp", 4),)), (Shard(0),)),
    "dp2 tp2": Layout(Mesh((0, 1, 2, 3), (("dp", 2), ("tp", 2))), (Shard(0), Replicate())),
    "dp2 @1,2": Layout(Mesh((1, 2), (("dp", 2),)), (Shard(0),)),
    "last stage": Layout(Mesh((0, 1, 2, 3), (("pp", 2), ("dp", 2))), (Only(1), Shard(0))),
    "whole @3": Layout(Mesh((3,), (("dp", 1),)), (Replicate(),)),
    "everywhere": Layout(Mesh((0, 1, 2, 3), (("dp", 4),)), (Replicate(),)),
}


def _whole() -> dict[str, Rows]:
    """All rows of all ports; some are empty, some strings are longer in bytes than in characters."""
    draw = random.Random(7)
    lengths = torch.tensor([draw.randrange(10) for _ in range(NUM_ROWS)])
    total = int(lengths.sum())
    return {
        "tokens": Rows(torch.arange(total, dtype=torch.int32), lengths),
        "text": from_strings(["ä" * (i % 4) + str(i) * (i % 3) for i in range(NUM_ROWS)]),
        "score": Rows(torch.arange(NUM_ROWS, dtype=torch.float32) / 7),
        "mask": Rows(torch.arange(total) % 3 == 0, lengths),
    }


def _move(rank: int, new_group, edge: EdgePlan) -> tuple[dict[str, Rows], int]:
    assert edge.source_layout
    world = World(rank, 4, torch.device("cpu"))
    boxes = edge.source_layout.boxes((NUM_ROWS,))
    held = {p: rows.slice(*boxes[rank][0]) for p, rows in _whole().items()} if rank in boxes else {}
    return move_rows(edge, PORTS, held, world, Peers.of(edge, new_group))


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["dp4", "dp2 tp2", "last stage", "dp2 @1,2", "whole @3"])
def test_rows_between_any_layouts(pool: Pool, source: str, target: str) -> None:
    edge = data_edge("e", PORTS, TYPES, ("a", LAYOUTS[source]), ("b", LAYOUTS[target]), CLUSTER)
    whole = _whole()
    needed = LAYOUTS[target].boxes((NUM_ROWS,))
    members = set(Peers.of(edge, lambda ranks: None).ranks)  # type: ignore[arg-type, return-value]
    results = pool.run(4, _move_if_member, edge, members)
    for rank, (got, received) in enumerate(results):
        assert set(got) == (set(PORTS) if rank in needed else set())
        if edge.collective == "alias":
            assert received == 0
        for port, rows in got.items():
            expected = whole[port].slice(*needed[rank][0])
            assert torch.equal(rows.values, expected.values), (port, rank)
            assert _same(rows.lengths, expected.lengths)


def _same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


def _move_if_member(rank: int, new_group, edge: EdgePlan, members: set[int]):
    if rank in members:
        return _move(rank, new_group, edge)
    Peers.of(edge, new_group)  # every rank makes every group
    return {}, 0


SHAPE = ModelShape("qwen2", 4, 16, 4, 2, 4, 24, 12, 64, 1e4, 1e-6, True, True)
MESHES = {
    "pp2 tp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "dp2 tp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "dp4": Mesh.of((0, 1, 2, 3), dp=4),
    "dp4 regrouped": Mesh.of((0, 2, 1, 3), dp=4),
    "pp4": Mesh.of((0, 1, 2, 3), pp=4),
    "tp2 @0-1": Mesh.of((0, 1), tp=2),
    "dp2 @2-3": Mesh.of((2, 3), dp=2),
}


class _Boxes:
    """Weights that hold nothing but a device's boxes, as dense tensors; unwritten elements are nan."""

    def __init__(self, mesh: Mesh, rank: int, fill: bool):
        self.tensors: dict[str, torch.Tensor] = {}
        self.mine = {}
        for parameter in parameters(SHAPE):
            box = weight_boxes(SHAPE, Sharding(mesh), parameter).get(rank)
            if box is None:
                continue
            self.mine[parameter.name] = box
            index = tuple(slice(*span) for span in box)
            self.tensors[parameter.name] = torch.full(parameter.shape, torch.nan)
            if fill:
                self.tensors[parameter.name][index] = _values(parameter.name, parameter.shape)[index]

    def read(self, name, box):
        return self.tensors[name][tuple(slice(*span) for span in box)]

    def write(self, name, box, values):
        self.tensors[name][tuple(slice(*span) for span in box)] = values


def _values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(map(ord, name))))


def _move_weights(rank: int, new_group, edge: EdgePlan) -> tuple[int, int]:
    """Bytes received, and elements of the target's boxes that came out wrong."""
    world = World(rank, 4, torch.device("cpu"))
    peers = Peers.of(edge, new_group)
    if rank not in peers.ranks:
        return 0, 0
    source = _Boxes(edge.source_mesh, rank, True) if rank in edge.source_mesh.devices else None
    target = _Boxes(edge.target_mesh, rank, False) if rank in edge.target_mesh.devices else None
    received = move_weights(edge, SHAPE, source, target, torch.float32, world, peers)
    wrong = 0
    for name, box in (target.mine if target else {}).items():
        shape = next(p.shape for p in parameters(SHAPE) if p.name == name)
        index = tuple(slice(*span) for span in box)
        wrong += int((target.tensors[name][index] != _values(name, shape)[index]).sum())  # type: ignore[union-attr]
    return received, wrong


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", ["pp2 tp2", "dp2 tp2", "pp4", "tp2 @0-1"])
def test_weights_between_any_meshes(pool: Pool, source: str, target: str) -> None:
    ends = ("a", Sharding(MESHES[source])), ("b", Sharding(MESHES[target]))
    edge = weight_edge("w", "f32", SHAPE, *ends, CLUSTER)
    results = pool.run(4, _move_weights, edge)
    assert [wrong for _, wrong in results] == [0] * 4
    assert max(received for received, _ in results) == edge.bytes_per_device
    assert edge.bytes_per_device == edge.lower_bound_bytes_per_device
