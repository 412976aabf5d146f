"""Collectives and shared links against closed forms, on the cluster files that are shipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from hflow.cost.comm import (
    REACHED,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    axis_link,
    host_transfer_s,
    one_shot_all_reduce_s,
    send_s,
)
from hflow.cost.execution import Execution
from hflow.plan.cluster import Cluster, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.engine_registry import GenerationEngine
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload

FAST = Link(100.0, 0.0)
GB = 1e9


def test_a_ring_moves_each_rank_all_parts_but_its_own() -> None:
    """Simulated: in each of n - 1 steps every rank passes one of n parts on."""
    for ranks in (2, 3, 8):
        steps = [1000.0 / ranks / FAST.bandwidth] * (ranks - 1)
        assert all_gather_s(1000.0, ranks, FAST) == pytest.approx(sum(steps))
        assert all_reduce_s(1000.0, ranks, FAST) == pytest.approx(2 * sum(steps))
    assert all_gather_s(1000.0, 1, FAST) == all_reduce_s(1000.0, 1, FAST) == 0.0


def test_small_all_reduces_go_up_and_down_a_tree() -> None:
    slow_start = Link(1e9, 1e-5)
    assert all_reduce_s(8.0, 64, slow_start) == pytest.approx(2 * 6 * 1e-5, rel=1e-3)
    ring = 2 * 63 / 64 * 1e9 / 1e9 + 2 * 63 * 1e-5
    assert all_reduce_s(1e9, 64, slow_start) == pytest.approx(ring), "the ring moves less"


def test_the_smallest_all_reduces_are_one_step() -> None:
    """Each of 8 ranks reads what the other seven have. Of much, the ring moves less, and of one rank nothing
    moves."""
    link = Link(1e9, 1e-5)
    assert one_shot_all_reduce_s(8000.0, 8, link) == pytest.approx(7 * 8e-6 + 1e-5)
    assert one_shot_all_reduce_s(1e9, 8, link) == all_reduce_s(1e9, 8, link)
    assert one_shot_all_reduce_s(8000.0, 1, link) == 0.0


def test_servers_on_gpus_sum_in_one_step() -> None:
    """Of a token of each of 32 rows on tp8: of its 32 layers two sums each. Megatron-core's are NCCL's, and
    on a CPU nobody has such kernels."""
    shape, mesh = NAMED_SHAPES["llama-7b"], Mesh.of(tuple(range(8)), tp=8)
    work, gpus = Workload(256, 128, 128), load_cluster("h100x8")
    cpus = replace(gpus, device=replace(gpus.device, platform="cpu"))

    def layers_s(cluster: Cluster, engine: GenerationEngine) -> float:
        run = Execution(shape, "bf16", work, mesh, 32, cluster, Strategy(engine=engine))
        return run.messages_s(32)

    link, size = axis_link(gpus, mesh, "tp"), 32 * 4096 * 2
    assert layers_s(gpus, "sglang") == pytest.approx(64 * (7 * size / link.bandwidth + link.latency_s))
    assert layers_s(gpus, "megatron") == pytest.approx(64 * all_reduce_s(size, 8, link))
    assert layers_s(cpus, "sglang") == layers_s(cpus, "megatron")


@pytest.mark.parametrize(
    ("cluster", "sizes", "axis", "expected"),
    [
        ("a100x16", {"dp": 2, "tp": 8}, "tp", 300.0),  # inside hosts
        ("a100x16", {"dp": 2, "tp": 8}, "dp", 25.0 / 8),  # eight rings share a host's only NIC
        ("a100x16", {"dp": 16}, "dp", 25.0),  # one ring has it for itself
        ("a100x16", {"dp": 4, "tp": 4}, "dp", 25.0 / 4),
        ("h100x16", {"dp": 2, "tp": 8}, "dp", 50.0),  # a NIC for each ring
        ("h100x16", {"dp": 16}, "dp", 400.0),  # all eight for one ring: less than NVLink's 450
    ],
)
def test_groups_share_their_hosts_nics(
    cluster: str, sizes: dict[str, int], axis: str, expected: float
) -> None:
    machines = load_cluster(cluster)
    link = axis_link(machines, Mesh.of(machines.devices, **sizes), axis)
    assert link.bandwidth == pytest.approx(expected * GB * REACHED["cuda"])


def test_a_lone_device_per_host_drives_one_nic_only() -> None:
    h100 = load_cluster("h100x16")
    assert axis_link(h100, Mesh.of((0, 8), dp=2), "dp").bandwidth == pytest.approx(50 * GB * REACHED["cuda"])


def test_measured_links_of_cpus_are_taken_as_they_are() -> None:
    local = load_cluster("local4")
    assert axis_link(local, Mesh.of((0, 1, 2, 3), dp=4), "dp") == local.intra_host


def test_offload_takes_the_host_link_and_is_out_of_reach_without_one() -> None:
    a100 = load_cluster("a100x8")
    assert a100.host_link
    link = Link(a100.host_link.bandwidth * REACHED["cuda"], a100.host_link.latency_s)
    assert host_transfer_s(40 * GB, a100) == send_s(40 * GB, link) == pytest.approx(40 / 16 / 0.8, rel=1e-3)
    assert host_transfer_s(1.0, replace(a100, host_link=None)) == float("inf")


def test_links_of_regular_meshes_are_those_found_by_a_look_at_every_group() -> None:
    """All layouts of up to 32 devices, that begin and end anywhere on hosts of 4, 6 and 8."""
    for per_host in (4, 6, 8):
        cluster = replace(load_cluster("h100x64"), devices_per_host=per_host, hosts=16, nics_per_host=2)
        for first, count in (
            (0, 4),
            (2, 4),
            (0, 8),
            (4, 8),
            (6, 12),
            (0, 16),
            (8, 16),
            (0, 24),
            (0, 32),
            (24, 24),
        ):
            for mesh in _meshes(first, count):
                for axis in ("pp", "dp", "cp", "dp_cp", "tp"):
                    assert axis_link(cluster, mesh, axis) == _by_definition(cluster, mesh, axis), (mesh, axis)


def _meshes(first: int, count: int) -> list[Mesh]:
    sizes = [d for d in range(1, count + 1) if count % d == 0]
    devices = tuple(range(first, first + count))
    return [
        Mesh.of(devices, pp, count // (pp * tp * cp), tp, cp)
        for pp, tp, cp in product(sizes, sizes, (1, 2))
        if count % (pp * tp * cp) == 0
    ]


def _by_definition(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    """A group that crosses hosts has its part of the NICs of the host on which most such groups meet."""
    share, nics = REACHED["cuda"], cluster.nics_per_host
    hosts = [[d // cluster.devices_per_host for d in group] for group in mesh.groups(*axis.split("_"))]
    across = [members for members in hosts if len(set(members)) > 1]
    bandwidth = cluster.intra_host.bandwidth
    if across:
        meeting = max(Counter(host for members in across for host in set(members)).values())
        fewest = min(members.count(host) for members in across for host in members)
        part = min(nics / meeting, fewest * max(1, nics / cluster.devices_per_host))
        bandwidth = min(bandwidth, cluster.inter_host.bandwidth * part)
    return Link(bandwidth * share, cluster.intra_host.latency_s)


def test_an_all_to_all_inside_a_host_sends_all_but_the_own_part() -> None:
    a100 = load_cluster("a100x8")
    seconds = all_to_all_s(8 * GB, a100, Mesh.of(a100.devices, dp=4, tp=2), "dp")
    assert seconds == pytest.approx(6 / 300 / REACHED["cuda"] + 3 * a100.intra_host.latency_s)
    assert all_to_all_s(8 * GB, a100, Mesh.of(a100.devices, dp=8), "tp") == 0.0


@pytest.mark.parametrize(("cluster", "nics", "rate"), [("a100x16", 1, 25.0), ("h100x16", 8, 50.0)])
def test_an_all_to_all_between_hosts_fills_their_nics(cluster: str, nics: int, rate: float) -> None:
    """Each of 8 devices sends half of its 16 GB to the other host."""
    machines = load_cluster(cluster)
    seconds = all_to_all_s(16 * GB, machines, Mesh.of(machines.devices, dp=16), "dp")
    assert seconds == pytest.approx(8 * 8 / (nics * rate) / REACHED["cuda"], rel=1e-3)
