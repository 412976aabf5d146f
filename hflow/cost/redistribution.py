"""The time of an edge, from who holds and who needs which part of a value.

The value is cut into equal cells; each device holds and needs a set of them (the bits of a mask). What a
device needs and lacks it receives once; what no device of its host holds enters the host once, from the
hosts that hold it, in equal shares. So the time is that of the busiest device's own link plus that of the
busiest host's NICs, in or out: the bounds of arXiv:2211.05322 that `reshard.lower` meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, lcm

from hflow.cost.comm import host_transfer_s, reached
from hflow.cost.device import BYTES
from hflow.cost.residency import wakes
from hflow.cost.weight_cells import Masks, blocks, grid_of, most_missing, on_hosts
from hflow.plan.cluster import Cluster
from hflow.plan.edges import INDEX_BYTES
from hflow.plan.engine_registry import GenerationEngine, profile_of
from hflow.plan.flops import expert_parameters
from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Layout, Placement, Shard, SharedShard, num_parts
from hflow.plan.model_shape import ModelShape
from hflow.plan.sharding import Sharding

# How often the bytes of weights are read and written while changed ones are found, or written, and a checksum
# is added up, in integers of eight bytes for each weight: of bf16 on CPUs (`benchmarks/delta_weights.py`).
SENT_PASSES, RECEIVED_PASSES = 14.0, 8.0


@dataclass(frozen=True)
class Cells:
    """Those of each device, and of the devices of each host together, as bits."""

    of_device: Masks
    of_host: Masks

    @classmethod
    def on(cls, cluster: Cluster, of_device: Masks) -> Cells:
        of_host: dict[int, int] = {}
        for device, mask in of_device.items():
            host = cluster.host(device)
            of_host[host] = of_host.get(host, 0) | mask
        return cls(of_device, of_host)


def weights_s(
    shape: ModelShape,
    dtype: str,
    source: Sharding,
    target: Sharding,
    cluster: Cluster,
    changed: float | None = None,
) -> float:
    """All weights of a model that move, as if all layers were of one size and everything were split over tp.
    A server copies what has arrived for it once more; on GPUs a further copy goes to the host's memory. That
    a device sends more than any receives, where few of a host have what many need, is not counted.

    Args:
        changed: the share of the weights that has changed since they were sent last. Where that is faster,
            only these are sent to other hosts (`sends_changed`).
    """
    whole_s = _whole_s(shape, dtype, source, target, cluster)
    if changed is None:
        return whole_s
    return min(whole_s, _changed_s(shape, dtype, source, target, cluster, changed))


def sends_changed(
    shape: ModelShape, dtype: str, source: Sharding, target: Sharding, cluster: Cluster, changed: float | None
) -> bool:
    """Whether only the weights that have changed, a share `changed` of all, are sent: between hosts, where
    that is faster."""
    if changed is None:
        return False
    ends = source, target, cluster
    return _changed_s(shape, dtype, *ends, changed) < _whole_s(shape, dtype, *ends)


@lru_cache(maxsize=65536)
def _whole_s(shape: ModelShape, dtype: str, source: Sharding, target: Sharding, cluster: Cluster) -> float:
    return 0.0 if source == target else _moved_s(shape, dtype, source, target, cluster, 1.0)


@lru_cache(maxsize=65536)
def _changed_s(
    shape: ModelShape, dtype: str, source: Sharding, target: Sharding, cluster: Cluster, changed: float
) -> float:
    """Both ends read all weights: the trainer compares them with those that it sent last and adds up a
    checksum, the reader adds up its own. Infinite between ends that have a host in common."""
    senders, readers = ({cluster.host(device) for device in end.mesh.devices} for end in (source, target))
    if senders & readers:
        return inf
    size, _ = weight_bytes(shape, dtype)
    parts = (end.mesh.tp * end.mesh.pp for end in (source, target))
    read = sum(passes * size / part for passes, part in zip((SENT_PASSES, RECEIVED_PASSES), parts))
    sent = min(1.0, changed * (1 + INDEX_BYTES / BYTES[dtype]))
    moved_s = _moved_s(shape, dtype, source, target, cluster, sent)
    on_device_s = read / cluster.device.memory_bandwidth
    return on_device_s + _fetched_s(size, target.engine, target.mesh.tp, cluster) + moved_s


def _moved_s(
    shape: ModelShape, dtype: str, source: Sharding, target: Sharding, cluster: Cluster, sent: float
) -> float:
    """`sent`: the share of all bytes that goes from host to host."""
    size, experts = weight_bytes(shape, dtype)
    seconds = handed_s(size, target.engine, target.mesh.tp, cluster)
    seconds += _weights_s(shape.num_layers, size - experts, source, target, cluster, 1, sent)
    if experts:
        parts = lcm(source.ep, target.ep)
        seconds += _weights_s(shape.num_layers, experts, source, target, cluster, parts, sent)
    return seconds


@lru_cache(maxsize=4096)
def handed_s(size: float, engine: GenerationEngine, tp: int, cluster: Cluster) -> float:
    """What a server does with `size` bytes when they have arrived."""
    if not profile_of(engine).server:
        return 0.0
    seconds = 2 * size / tp / cluster.device.memory_bandwidth  # each byte is read and written
    return seconds + _fetched_s(size, engine, tp, cluster)


def _fetched_s(size: float, engine: GenerationEngine, tp: int, cluster: Cluster) -> float:
    """Of `size` bytes between a device and the copy that its server's worker keeps in the host's memory."""
    if profile_of(engine).server and cluster.host_link and cluster.device.platform == "cuda":
        return host_transfer_s(round(size / tp), cluster)
    return 0.0


def waking_s(shape: ModelShape, dtype: str, engine: GenerationEngine, lag: int, cluster: Cluster) -> float:
    """Until a server that slept generates with new weights, beside what these take to come to its devices. It
    depends on the bytes of the whole model, however it is split: each server takes in all tensors, one after
    the other. Nothing where it never sleeps, or nobody has said how it wakes (`Cluster.wake`)."""
    if not (cluster.wake and wakes(engine, cluster, shape, lag)):
        return 0.0
    size, _ = weight_bytes(shape, dtype)
    return cluster.wake.latency_s + size / cluster.wake.bandwidth


def weight_bytes(shape: ModelShape, dtype: str) -> tuple[int, int]:
    """Of what moves of a model, and of its experts alone."""
    experts = 0 if shape.adapter else expert_parameters(shape)
    return _num_moved(shape) * BYTES[dtype], experts * BYTES[dtype]


@lru_cache(maxsize=256)
def _num_moved(shape: ModelShape) -> int:
    return sum(parameter.size for parameter in moved_parameters(shape))


@lru_cache(maxsize=65536)
def rows_s(rows: int, width: int, source: Layout, target: Layout, cluster: Cluster) -> float:
    """`rows` rows of `width` bytes each."""
    cells = lcm(_row_parts(source), _row_parts(target))
    held, needed = _row_cells(source, cells, cluster), _row_cells(target, cells, cluster)
    return redistribution_s(held, needed, rows * width / cells, cluster)


def redistribution_s(held: Cells, needed: Cells, cell_bytes: float, cluster: Cluster) -> float:
    """Seconds until every device has the cells that it needs."""
    before = held.of_device
    most = max((mask & ~before.get(device, 0)).bit_count() for device, mask in needed.of_device.items())
    if not most:
        return 0.0
    return _seconds(
        most * cell_bytes, _through_host([(1, held.of_host, needed.of_host)]) * cell_bytes, cluster
    )


def _seconds(received: float, through_host: float, cluster: Cluster) -> float:
    """Of so many bytes over the busiest device's own link, and so many over the busiest host's NICs."""
    link = reached(cluster, cluster.intra_host)
    seconds = received / link.bandwidth + link.latency_s
    if not through_host:
        return seconds
    nics = reached(cluster, cluster.inter_host, cluster.nics_per_host)
    return seconds + through_host / nics.bandwidth + nics.latency_s


def _through_host(cells: Iterable[tuple[int, Masks, Masks]]) -> float:
    """Cells that enter the busiest host, or that leave it, which are more.

    Args:
        cells: how many times there are such, those that hosts hold, and those that they need.
    """
    entering, leaving = Counter[int](), dict[int, float]()
    for times, inside, needed in cells:
        lacking = {host: lacks for host, mask in needed.items() if (lacks := mask & ~inside.get(host, 0))}
        for host, mask in lacking.items():
            entering[host] += times * mask.bit_count()
        for host, sent in _sent(inside, lacking.values()).items():
            leaving[host] = leaving.get(host, 0.0) + times * sent
    return max(0, *entering.values(), *leaving.values())


def _sent(inside: Masks, entering: Iterable[int]) -> dict[int, float]:
    """Cells that each host sends, if the hosts that hold a cell share its copies equally. Cells that the same
    hosts hold and want are counted together, and so are hosts that hold or want the same."""
    holding, wanting = Counter(inside.values()), Counter(entering)
    if len(holding) == 1:
        [(cells, shares)] = holding.items()
        sum_of_copies = sum(count * (mask & cells).bit_count() for mask, count in wanting.items())
        return dict.fromkeys(inside, sum_of_copies / shares)
    sent = dict.fromkeys(holding, 0.0)
    for cells in _parts((*wanting, *holding)) if wanting else ():
        copies = sum(count for mask, count in wanting.items() if mask & cells)  # none of what nobody lacks
        holders = [mask for mask in holding if mask & cells] if copies else []
        shares = sum(map(holding.__getitem__, holders))
        for mask in holders:
            sent[mask] += cells.bit_count() * copies / shares
    return {host: sent[mask] for host, mask in inside.items()}


def _parts(masks: Iterable[int]) -> list[int]:
    """The cells of all masks, parted into those that are in exactly the same ones."""
    parts, seen = list[int](), 0
    for mask in masks:
        split = [part for whole in parts for part in (whole & mask, whole & ~mask)]
        parts = [part for part in (*split, mask & ~seen) if part]
        seen |= mask
    return parts


def _weights_s(
    num_layers: int,
    size: float,
    source: Sharding,
    target: Sharding,
    cluster: Cluster,
    experts: int,
    sent: float,
) -> float:
    """`experts`: the parts into which experts are cut; 1 for what every rank of dp has. `sent`: the share of
    what hosts need that is sent to them."""
    grid = grid_of(source, target, num_layers, experts)
    held, needed = (blocks(sharding, num_layers, grid) for sharding in (source, target))
    most, cell_bytes = most_missing(held, needed), size / grid.size
    if not most:
        return 0.0
    through_host = sent * _through_host(on_hosts(source, target, num_layers, grid, cluster)) * cell_bytes
    return _seconds(most * cell_bytes, through_host, cluster)


def _row_parts(layout: Layout) -> int:
    return lcm(*(num_parts(p, size) for (_, size), p in zip(layout.mesh.axes, layout.placements)))


@lru_cache(maxsize=4096)
def _row_cells(layout: Layout, cells: int, cluster: Cluster) -> Cells:
    """The rows of each device."""
    boxes = Layout(layout.mesh, tuple(map(_of_cells, layout.placements))).boxes((cells,))
    masks = {device: (1 << stop) - (1 << start) for device, ((start, stop),) in boxes.items()}
    return Cells.on(cluster, masks)


def _of_cells(placement: Placement) -> Placement:
    """The same for cells, which cut through no group of rows."""
    return replace(placement, unit=1) if isinstance(placement, Shard | SharedShard) else placement
