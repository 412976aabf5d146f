"""What changed weights alone take: closed forms, and where all are sent all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.cost.comm import host_transfer_s, reached
from hflow.cost.redistribution import RECEIVED_PASSES, SENT_PASSES, sends_changed, weights_s
from hflow.cost.residency import residency
from hflow.graph.ir import Model
from hflow.plan.cluster import Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.frozen import TrainedWith
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN

SHAPE = NAMED_SHAPES["qwen3-8b"]
CLUSTER = replace(load_cluster("h100x16"), inter_host=Link(1.25e9, 1e-5), nics_per_host=1)  # 10 Gb/s
TRAINER = Sharding(Mesh.of(tuple(range(8)), tp=8))
READER = Sharding(Mesh.of(tuple(range(8, 16)), tp=8))


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 0.03), ("f32", 0.02)])
def test_values_and_places_go_from_host_to_host(dtype: str, share: float) -> None:
    """1% of the weights, each of 2 or 4 bytes with a place of 4; inside the host it is as before."""
    whole_s, changed_s = (weights_s(SHAPE, dtype, TRAINER, READER, CLUSTER, of) for of in (None, 0.01))
    size = {"bf16": 2, "f32": 4}[dtype] * num_parameters(SHAPE)
    read_s = (SENT_PASSES + RECEIVED_PASSES) * size / 8 / CLUSTER.device.memory_bandwidth
    between_s = size / reached(CLUSTER, CLUSTER.inter_host).bandwidth
    assert whole_s - changed_s == pytest.approx((1 - share) * between_s - read_s, rel=0.01)


def test_a_server_fetches_what_it_got_before() -> None:
    """From the host's memory, over the link of its device."""
    served = replace(READER, engine="sglang")
    more_s = [
        weights_s(SHAPE, "bf16", TRAINER, served, CLUSTER, share)
        - weights_s(SHAPE, "bf16", TRAINER, READER, CLUSTER, share)
        for share in (None, 0.01)
    ]
    fetched_s = host_transfer_s(2 * num_parameters(SHAPE) // 8, CLUSTER)
    assert more_s[1] - more_s[0] == pytest.approx(fetched_s, rel=0.01)


@pytest.mark.parametrize(
    ("reader", "share", "cluster"),
    [
        (READER, 0.9, CLUSTER),  # nearly all has changed
        (READER, 0.01, load_cluster("gb200x72")),  # one host
        (Sharding(Mesh.of(tuple(range(4, 12)), tp=8)), 0.01, CLUSTER),  # half of it beside the trainer
        (TRAINER, 0.01, CLUSTER),
    ],
)
def test_all_are_sent_where_that_is_faster(reader: Sharding, share: float, cluster: object) -> None:
    ends = SHAPE, "bf16", TRAINER, reader, cluster
    assert not sends_changed(*ends, share)  # type: ignore[arg-type]
    assert weights_s(*ends, share) == weights_s(*ends)  # type: ignore[arg-type]


def test_the_trainer_keeps_what_it_sent() -> None:
    """A copy of its weights in their dtype for each reader; readers have theirs anyway."""
    model, mesh = Model("actor", "shape:qwen3-8b", dtype="bf16"), TRAINER.mesh
    kept = [
        residency(model, SHAPE, mesh, PLAIN, CLUSTER, "train", trained=TrainedWith(sent=sent)).always
        for sent in (0, 2)
    ]
    assert kept[1].size - kept[0].size == pytest.approx(2 * 2 * num_parameters(SHAPE) / 8, rel=1e-3)
    assert kept[1].label == f"{kept[0].label}, weights sent last"
    readers = [
        residency(model, SHAPE, mesh, PLAIN, CLUSTER, "read", 1, trained=TrainedWith(sent=sent))
        for sent in (0, 2)
    ]
    assert readers[0] == readers[1]
