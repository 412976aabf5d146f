"""Time of communication: alpha-beta with ring factors (bytes received per rank over its link)."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.compiler.cluster import Cluster, Link


def link_between(cluster: Cluster, devices: Iterable[int]) -> Link:
    """The slowest link that a group of devices has to use."""
    one_host = len({cluster.host(d) for d in devices}) <= 1
    return cluster.intra_host if one_host else cluster.inter_host


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Ring all-reduce of `size_bytes` per rank: 2(n-1)/n of the bytes, 2(n-1) messages."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size_bytes / link.bandwidth + 2 * (ranks - 1) * link.latency_s


def send_s(size_bytes: float, link: Link) -> float:
    return size_bytes / link.bandwidth + link.latency_s
