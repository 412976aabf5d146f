"""Transfers between real processes: every rank ends up with the rows that its layout says."""

from __future__ import annotations

import random

import pytest
import torch

from hflow.compiler.lowering import UnloweredDataEdge
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.edges import DataEdge
from hflow.plan.layout import Layout, Mesh, Only, Replicate, Shard
from hflow.runtime.rows import Rows, from_strings
from hflow.runtime.worker.transfer import Received, move_rows
from hflow.runtime.worker.world import Peers, World
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


def _move(rank: int, new_group, edge: DataEdge) -> tuple[dict[str, Rows], Received]:
    world = World(rank, 4, torch.device("cpu"))
    boxes = edge.source_layout.boxes((NUM_ROWS,))
    held = {p: rows.slice(*boxes[rank][0]) for p, rows in _whole().items()} if rank in boxes else {}
    ranks = _ranks(edge)
    return move_rows(edge, PORTS, held, world, Peers(ranks, new_group(ranks)))


def _ranks(edge: DataEdge) -> tuple[int, ...]:
    return tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))


@pytest.mark.matrix
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["dp4", "dp2 tp2", "last stage", "dp2 @1,2", "whole @3"])
def test_rows_between_any_layouts(pool: Pool, source: str, target: str) -> None:
    ends = LAYOUTS[source], LAYOUTS[target]
    edge = UnloweredDataEdge("e", "a", "b", PORTS, TYPES, *ends).lowered(CLUSTER)
    whole = _whole()
    needed = LAYOUTS[target].boxes((NUM_ROWS,))
    results = pool.run(4, _move_if_member, edge)
    for rank, (got, received) in enumerate(results):
        assert set(got) == (set(PORTS) if rank in needed else set())
        if edge.collective == "alias":
            assert received == Received()
        for port, rows in got.items():
            expected = whole[port].slice(*needed[rank][0])
            assert torch.equal(rows.values, expected.values), (port, rank)
            assert _same(rows.lengths, expected.lengths)


def _same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


def _move_if_member(rank: int, new_group, edge: DataEdge):
    if rank in _ranks(edge):
        return _move(rank, new_group, edge)
    new_group(_ranks(edge))  # every rank makes every group
    return {}, Received()
