"""What models with experts take longer, and what they save, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.cost import experts
from hflow.cost.comm import axis_link, reached
from hflow.cost.compute import train_passes_s, update_s
from hflow.cost.execution import Execution
from hflow.cost.experts import COPY_ACCESSES, copies_s, exchange_s, expert_replicas, padding_flops
from hflow.cost.generation import decode_s
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload

LLAMA = NAMED_SHAPES["llama-7b"]
TRAIN = Workload(8, 1024, 1024, optimizer_steps=1, rows_per_update=8)
MOE = NAMED_SHAPES["qwen3-30b-a3b"]
EXPERTS = 48 * 128 * 3 * 2048 * 768


def test_tokens_travel_to_their_experts_and_back(plain: Cluster) -> None:
    """In each of 48 layers, 8 copies of a token of 2048 bf16 numbers; 3 of 4 go to another device. There and
    back, in the forward pass once and in the backward pass once. Of 128 experts a device has 32, and as many
    tiles that are half empty."""
    mesh, work = Mesh.of((0, 1, 2, 3), dp=4), replace(TRAIN, rows=64, rows_per_update=64)
    alone, shared = (
        train_passes_s(Execution(MOE, "bf16", work, mesh, 16, plain, Strategy(ep=ep))) for ep in (1, 4)
    )
    way = 16 * 2048 * 8 * 2048 * 2 * 3 / 4 / (300e9 * 0.8)
    fewer_tiles = 3 * 2 * 32 * (128 - 32) * 48 * 3 * 2048 * 768 / 312e12
    assert shared - alone == pytest.approx(48 * 4 * way - fewer_tiles, rel=1e-6)


def test_grouped_products_work_on_whole_tiles(plain: Cluster) -> None:
    """Of 64 rows. Of 128 experts, each with many rows, one tile is half empty; of 8 tokens, which choose 52
    of them on average, all rows but one or two."""
    one = 48 * 3 * 2048 * 768  # parameters of one expert, in all layers
    assert padding_flops(MOE, 4096, 1, plain.device) == pytest.approx(2 * 128 * 32 * one)
    touched = 128 * (1 - (120 / 128) ** 8)
    assert padding_flops(MOE, 8, 1, plain.device) == pytest.approx(2 * (64 * touched - 64) * one)
    assert padding_flops(MOE, 4096, 8, plain.device) == pytest.approx(2 * 16 * 32 * one)
    assert padding_flops(LLAMA, 4096, 1, plain.device) == 0.0
    cpu = replace(plain.device, platform="cpu")
    assert padding_flops(MOE, 4096, 1, cpu) == 0.0


def test_copies_of_tokens_are_moved_in_memory(plain: Cluster) -> None:
    """8 of each of 4096 tokens in each of 48 layers, of 2048 bf16 numbers; on CPUs nothing was measured."""
    moved = COPY_ACCESSES * 8 * 4096 * 48 * 2048 * 2
    assert copies_s(MOE, 4096, "bf16", plain.device) == pytest.approx(moved / 2.039e12)
    assert copies_s(LLAMA, 4096, "bf16", plain.device) == 0.0
    assert copies_s(MOE, 4096, "bf16", replace(plain.device, platform="cpu")) == 0.0


@pytest.mark.parametrize("cut", [{}, {"tp": 2}, {"pp": 2}], ids=["whole", "tp2", "pp2"])
def test_what_copies_take_is_in_passes(plain: Cluster, cut: dict[str, int]) -> None:
    """Three times in training. A stage has half of the layers, and waits for the other; each rank of tp has
    all tokens."""
    mesh = Mesh.of(tuple(range(len(cut) + 1)), **cut)
    work = replace(TRAIN, rows=64, rows_per_update=64)
    run = Execution(MOE, "bf16", work, mesh, 16, plain)
    with_copies = train_passes_s(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "COPY_ACCESSES", 0)
        without = train_passes_s(run)
    once = copies_s(MOE, 16 * 2048, "bf16", plain.device) / mesh.pp
    assert with_copies - without == pytest.approx((4 + mesh.pp - 1) * 3 * once)


@pytest.mark.parametrize("cp", [1, 2])
def test_gradients_of_experts_are_reduced_where_they_are_the_same(plain: Cluster, cp: int) -> None:
    """By two ranks: of dp, or of cp where four ranks of dp share the experts."""
    mesh, common = Mesh.of(tuple(range(8)), dp=8 // cp, cp=cp), num_parameters(MOE) - EXPERTS
    held = common + EXPERTS / 4
    reduced = 2 * 4 * (7 / 8 * common + 1 / 2 * EXPERTS / 4) / (300e9 * 0.8)
    assert update_s(MOE, "bf16", mesh, plain, Strategy(ep=4)) == pytest.approx(32 * held / 2.039e12 + reduced)


def test_experts_are_exchanged_and_reduced_over_hosts_where_their_ranks_are() -> None:
    """Of dp2 cp8 on two hosts of 8: experts that both replicas share are exchanged over the network, as of
    dp2 tp8, and their gradients are summed within a host; without ep they are summed over both."""
    cluster, devices = load_cluster("a100x16"), tuple(range(16))
    cut, whole = Mesh.of(devices, dp=2, cp=8), Mesh.of(devices, dp=2, tp=8)
    seconds = [exchange_s(MOE, 1e6, mesh, cluster, Strategy(ep=2)) for mesh in (cut, whole)]
    assert seconds[0] == seconds[1] > 8 * 1e6 / 8 / cluster.inter_host.bandwidth
    links = [axis_link(cluster, expert_replicas(cut, Strategy(ep=ep)), "dp_cp") for ep in (1, 2)]
    assert links[1].bandwidth == reached(cluster, cluster.intra_host).bandwidth > links[0].bandwidth


def test_whole_experts_get_a_part_of_the_tokens_from_each_rank_of_tp(plain: Cluster) -> None:
    """Of dp4 tp2, eight ranks share them: each sends half of its group's tokens, 7 of 8 copies to others. The
    four of dp that share cut ones send all, 3 of 4 copies. With sequence parallelism two of the four
    gatherings and scatterings of a layer are spared, too: a rank sends the tokens that it has."""
    mesh, size, link = Mesh.of(tuple(range(8)), dp=4, tp=2), 1e6, 300e9 * 0.8
    whole, cut = Strategy(ep=8, whole_experts=True), Strategy(ep=4)
    assert exchange_s(MOE, size, mesh, plain, cut) == pytest.approx(2 * 8 * size * 3 / 4 / link)
    assert exchange_s(MOE, size, mesh, plain, whole) == pytest.approx(2 * 8 * size / 2 * 7 / 8 / link)
    work, tokens = Workload(64, 0, 1024, optimizer_steps=1, rows_per_update=64), 4096.0
    taken = {
        (how.whole_experts, sp): Execution(MOE, "bf16", work, mesh, 1, plain, replace(how, sp=sp)).messages_s(
            tokens
        )
        for how in (whole, cut)
        for sp in (False, True)
    }
    gather_s = tokens * 2048 * 2 / 2 / link
    spared = taken[True, False] - taken[True, True]
    assert spared == pytest.approx(48 * 2 * gather_s)
    assert taken[False, False] == pytest.approx(taken[False, True])


def test_whole_experts_are_reduced_and_read_as_cut_ones(plain: Cluster) -> None:
    """Spread over eight ranks, each device has as many weights as when four ranks of dp share what two of tp
    cut, and of no more replicas."""
    mesh, work = Mesh.of(tuple(range(16)), dp=8, tp=2), Workload(512, 0, 64)
    whole, cut = Strategy(ep=8, whole_experts=True), Strategy(ep=4)
    assert update_s(MOE, "bf16", mesh, plain, whole) == pytest.approx(update_s(MOE, "bf16", mesh, plain, cut))
    seconds = [
        decode_s(Execution(MOE, "bf16", work, mesh, 64, plain, how))
        - 64 * 48 * exchange_s(MOE, 64 * 2048 * 2, mesh, plain, how)
        for how in (whole, cut)
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_replicas_that_share_experts_read_fewer_weights(a100: Cluster) -> None:
    mesh, work = Mesh.of(tuple(range(8)), dp=8), Workload(512, 0, 64)
    alone, shared = (decode_s(Execution(MOE, "bf16", work, mesh, 64, a100, Strategy(ep=ep))) for ep in (1, 8))
    bandwidth = 2.039e12 * a100.device.calibration.decode_bandwidth_efficiency
    fewer = (1 - (15 / 16) ** 64) - (1 - (15 / 16) ** 512) / 8
    saved = 64 * 2 * EXPERTS * fewer / bandwidth
    way = 2 * 64 * 48 * (64 * 8 * 2048 * 2 * 7 / 8 / (300e9 * 0.8) + 7e-5)
    assert alone - shared == pytest.approx(saved - way, rel=1e-6)
