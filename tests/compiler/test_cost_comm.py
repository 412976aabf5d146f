"""Collectives and shared links against closed forms, on the cluster files that are shipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.compiler.cluster import Link
from hflow.compiler.cluster_file import load_cluster
from hflow.compiler.cost.comm import (
    REACHED,
    all_gather_s,
    all_reduce_s,
    axis_link,
    host_transfer_s,
    link_between,
    send_s,
)
from hflow.compiler.layout import Mesh

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


def test_a_devices_share_of_a_link_is_what_is_left_when_all_of_its_host_send() -> None:
    a100, h100 = load_cluster("a100x16"), load_cluster("h100x16")
    share = REACHED["cuda"]
    assert link_between(a100, (0, 7)).bandwidth == pytest.approx(300 * GB * share)
    assert link_between(a100, (0, 8)).bandwidth == pytest.approx(25 / 8 * GB * share)
    assert link_between(h100, (0, 8)).bandwidth == pytest.approx(50 * GB * share)


def test_measured_links_of_cpus_are_taken_as_they_are() -> None:
    local = load_cluster("local4")
    assert link_between(local, (0, 3)) == local.intra_host


def test_offload_takes_the_host_link_and_is_out_of_reach_without_one() -> None:
    a100 = load_cluster("a100x8")
    assert a100.host_link
    link = Link(a100.host_link.bandwidth * REACHED["cuda"], a100.host_link.latency_s)
    assert host_transfer_s(40 * GB, a100) == send_s(40 * GB, link) == pytest.approx(40 / 32 / 0.8, rel=1e-3)
    assert host_transfer_s(1.0, replace(a100, host_link=None)) == float("inf")
