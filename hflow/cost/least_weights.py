"""What weights that move take at least, whatever devices their source and their target lie on.

Of a target's devices only so much is known: how many of one host, at least, receive weights; how many whole
hosts do; and from how many hosts the weights come. `redistribution.weights_s` takes no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hflow.cost.comm import reached
from hflow.cost.redistribution import handed_s, weight_bytes
from hflow.plan.cluster import Cluster
from hflow.plan.model_shape import ModelShape
from hflow.plan.pipeline_stages import stage_chunks
from hflow.plan.sharding import Sharding

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Receivers(NamedTuple):
    """Of a target's devices, so many are `on_host`, at least, for one host; there are `hosts` whole ones; and
    what these lack comes from no more than `senders` hosts."""

    on_host: int
    hosts: int
    senders: int


ANYWHERE = Receivers(1, 0, 1)  # nothing is known


def apart(count: int, others: int, cluster: Cluster) -> Receivers:
    """Of `count` devices in a row, beside the row of the source's, which are as many as `others` or fewer:
    the two share a host at the most, the first of the target's or the last."""
    smallest, largest = _host_sizes(cluster)
    beyond = max(0, count - largest + 1)
    return Receivers(min(smallest, beyond), beyond // largest, _hosts(others, cluster))


def beyond(count: int, others: int, cluster: Cluster) -> Receivers:
    """Of the first `count` devices, among which are those of the source, in a row."""
    smallest, largest = _host_sizes(cluster)
    senders = _hosts(others, cluster)
    whole = max(0, count // largest - senders)
    return Receivers(smallest if whole else 0, whole, senders)


def within(count: int, cluster: Cluster) -> Receivers:
    """Of `count` devices in a row, among those of the source: they are on one host, or one of two has half of
    them, or there is a whole one."""
    return Receivers(min(_host_sizes(cluster)[0], -(-count // 2)), 0, 1)


def _hosts(count: int, cluster: Cluster) -> int:
    """On how many hosts a row of devices is, at the most."""
    smallest, _ = _host_sizes(cluster)
    return (count + smallest - 2) // smallest + 1


def _host_sizes(cluster: Cluster) -> tuple[int, int]:
    """The fewest and the most devices of a host."""
    sizes = [group.devices_per_host for group in cluster.groups]
    return min(sizes), max(sizes)


class Pieces(NamedTuple):
    """The least and the greatest part of some weights on a device."""

    least: float
    most: float


def least_weights_s(
    shape: ModelShape,
    dtype: str,
    sources: Sequence[Sharding],
    targets: Sequence[Sharding],
    receivers: Sequence[Receivers],
    cluster: Cluster,
) -> FloatArray:
    """Seconds, by target and source.

    Args:
        sources: how any of the receivers may hold what it needs already; without any, for nobody does, there
            is one column.
        targets: their devices do not matter. receivers: of each target.
    """
    size, experts = weight_bytes(shape, dtype)
    seconds = np.array([[handed_s(size, t.engine, t.mesh.tp, cluster)] for t in targets])
    of = np.array(receivers).T[:, :, None]
    tp = np.array([[target.mesh.tp] for target in targets])
    for part, with_experts in ((size - experts, False), (experts, True)):
        if part:
            held = np.array([_pieces(s, shape.num_layers, with_experts).most for s in sources] or [0.0])
            needed = np.array([[_pieces(t, shape.num_layers, with_experts).least] for t in targets])
            seconds = seconds + _least_s(part, held, needed, tp, of, cluster)
    return seconds


def _least_s(
    size: float, held: FloatArray, needed: FloatArray, tp: IntArray, receivers: IntArray, cluster: Cluster
) -> FloatArray:
    """Of `size` bytes, of which each device has the part `held` at most, and needs `needed` at least.
    Neighbours along tp need different parts."""
    link, nics = (
        reached(cluster, cluster.intra_host),
        reached(cluster, cluster.inter_host, cluster.nics_per_host),
    )
    smallest, largest = _host_sizes(cluster)
    on_host, hosts, senders = receivers
    lacking = np.maximum(needed - held, 0.0)
    entering = np.maximum(np.minimum(on_host, tp) * needed - np.minimum(1.0, largest * held), 0.0)
    leaving = np.where(held > 0, 0.0, hosts * np.minimum(smallest, tp) * needed / senders)
    into_devices = lacking * size / link.bandwidth + link.latency_s
    into_hosts = np.maximum(entering, leaving) * size / nics.bandwidth + nics.latency_s
    seconds: FloatArray = np.where(lacking > 0, into_devices + np.where(entering > 0, into_hosts, 0.0), 0.0)
    return seconds


@lru_cache(maxsize=65536)
def _pieces(sharding: Sharding, num_layers: int, experts: bool) -> Pieces:
    mesh = sharding.mesh
    split = mesh.tp * (mesh.dp if sharding.fully else 1)
    if experts and not sharding.fully:
        split = sharding.expert_tp * sharding.ep
    if not num_layers % (mesh.pp * sharding.vpp):
        return Pieces(1 / (split * mesh.pp), 1 / (split * mesh.pp))
    layers = [sum(map(len, stage_chunks(num_layers, mesh.pp, stage))) for stage in range(mesh.pp)]
    return Pieces(min(layers) / num_layers / split, max(layers) / num_layers / split)
