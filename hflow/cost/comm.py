"""Time of communication: alpha-beta, with what links really reach and how a host's NICs are shared.

A collective of n ranks on S bytes: ring all-gather and reduce-scatter take (n-1)/n·S / bandwidth +
(n-1)·latency, an all-reduce twice that; a tree takes 2·S / bandwidth + 2·log2(n)·latency, which wins where
S is small (Sanders et al., 2009; both are what NCCL chooses from).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil, log2

from hflow.plan.cluster import Cluster, Link
from hflow.plan.layout import Mesh

# The share of a link's data-sheet bandwidth that collectives reach: nccl-tests report 235 of 300 GB/s on
# eight A100s. Links of CPU clusters are measured, so nothing is taken off.
REACHED = {"cuda": 0.8, "cpu": 1.0}


@lru_cache(maxsize=65536)
def axis_link(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    """What each group of `axis` gets when all groups run a collective at once; those of ``dp_cp`` are ranks
    that have the same weights.

    A ring enters and leaves each host once, so the groups on a host share its NICs; the members of a group on
    one host drive no more NICs than are theirs.
    """
    return _shared_link(cluster, *_crossing(cluster, mesh, axis))


def _crossing(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[int, int]:
    """Of an axis whose groups cross hosts: the most groups that meet on a host, and the fewest members that
    a group has there; zeros if no group crosses."""
    found = _regular(cluster, mesh, axis)
    return _counted(cluster, mesh, axis) if found is None else found


def _regular(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[int, int] | None:
    """`_crossing` of a mesh that fills hosts, or parts of one, evenly; None for others.

    A group's members are `stride` devices apart, so groups fill blocks of stride times size devices; but for
    those along dp and cp with other ranks between.
    """
    if cluster.more or not mesh.consecutive or mesh.size("ep") > 1:
        return None
    per_host, inner = cluster.devices_per_host, mesh.cp * mesh.tp
    strides = {"tp": 1, "cp": mesh.tp, "dp": inner, "dp_cp": mesh.tp, "pp": inner * mesh.dp}
    stride, first = strides[axis], mesh.devices[0] % per_host
    size = mesh.copies if axis == "dp_cp" else mesh.size(axis)
    block = stride * size
    if size == 1 or first + len(mesh.devices) <= per_host or (per_host % block == 0 and first % block == 0):
        return 0, 0
    if first or block % per_host or (per_host % stride and stride % per_host):
        return None
    rings = min(stride, per_host)
    return rings, per_host // rings


@lru_cache(maxsize=4096)
def _counted(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[int, int]:
    """`_crossing`, by a look at each group."""
    hosts = [Counter(map(cluster.host, group)) for group in mesh.groups(*axis.split("_"))]
    across = [members for members in hosts if len(members) > 1]
    if not across:
        return 0, 0
    rings = max(Counter(host for members in across for host in members).values())
    return rings, min(min(members.values()) for members in across)


def crosses_hosts(cluster: Cluster, mesh: Mesh, axis: str) -> bool:
    """Whether a group of `axis` has members on several hosts."""
    return _crossing(cluster, mesh, axis) != (0, 0)


@lru_cache(maxsize=4096)
def _shared_link(cluster: Cluster, rings: int, members: int) -> Link:
    """The link of a group of which `members` are on a host that it shares with `rings` groups in all."""
    intra = reached(cluster, cluster.intra_host)
    if not rings:
        return intra
    share = min(cluster.nics_per_host / rings, members * max(1.0, _device_share(cluster)))
    inter = reached(cluster, cluster.inter_host, share)
    return Link(min(intra.bandwidth, inter.bandwidth), max(intra.latency_s, inter.latency_s))


def reached(cluster: Cluster, link: Link, share: float = 1.0) -> Link:
    """`link` with the bandwidth that `share` of it gives in practice."""
    return Link(link.bandwidth * share * REACHED[cluster.device.platform], link.latency_s)


def _device_share(cluster: Cluster) -> float:
    """NICs per device."""
    return cluster.nics_per_host / max(group.devices_per_host for group in cluster.groups)


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """All-reduce of `size_bytes` per rank, by ring or by tree."""
    if ranks == 1:
        return 0.0
    tree = 2 * size_bytes / link.bandwidth + 2 * ceil(log2(ranks)) * link.latency_s
    return min(2 * all_gather_s(size_bytes, ranks, link), tree)


def one_shot_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Where every rank reads what all others have and adds it up itself: in one step, which wins where S is
    smallest, as in decoding (the custom all-reduce kernels of vLLM, SGLang and TensorRT-LLM). Of ranks on one
    host."""
    if ranks == 1:
        return 0.0
    one_shot = (ranks - 1) * size_bytes / link.bandwidth + link.latency_s
    return min(one_shot, all_reduce_s(size_bytes, ranks, link))


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Ring all-gather of a value of `size_bytes` from its `ranks` parts; a reduce-scatter takes as long."""
    return (ranks - 1) / ranks * size_bytes / link.bandwidth + (ranks - 1) * link.latency_s


def all_to_all_s(size_bytes: float, cluster: Cluster, mesh: Mesh, axis: str) -> float:
    """Each rank of `axis` has `size_bytes`, an equal part for every rank, itself included; all groups do it
    at once. What stays inside a host and what leaves it travel side by side; devices share a host's NICs."""
    ranks = mesh.size(axis)
    if ranks == 1:
        return 0.0
    groups, members = _crossing(cluster, mesh, axis)
    intra, part = reached(cluster, cluster.intra_host), size_bytes / ranks
    if not groups:
        return (ranks - 1) * (part / intra.bandwidth + intra.latency_s)
    share = min(cluster.nics_per_host / (groups * members), max(1.0, _device_share(cluster)))
    inter = reached(cluster, cluster.inter_host, share)
    inside, outside = (members - 1) * part / intra.bandwidth, (ranks - members) * part / inter.bandwidth
    return max(inside, outside) + (ranks - 1) * inter.latency_s


def send_s(size_bytes: float, link: Link) -> float:
    return size_bytes / link.bandwidth + link.latency_s


def host_transfer_s(size_bytes: float, cluster: Cluster) -> float:
    """Offload or onload of `size_bytes` of one device, while all devices of its host do the same.

    Infinite where the cluster has no `host_link`: nothing can be moved there.
    """
    if cluster.host_link is None:
        return float("inf")
    return send_s(size_bytes, reached(cluster, cluster.host_link))
