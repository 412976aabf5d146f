"""The time of an edge, from who holds and who needs which part of a value.

The value is cut into equal cells; each device holds and needs a set of them (the bits of a mask). What a
device needs and lacks it receives once; what no device of its host holds enters the host once, from the
hosts that hold it, in equal shares. So the time is that of the busiest device's own link plus that of the
busiest host's NICs, in or out: the bounds of arXiv:2211.05322 that `reshard.lower` meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import inf, lcm

from hflow.cost.comm import host_transfer_s, reached
from hflow.cost.device import BYTES
from hflow.plan.cluster import Cluster
from hflow.plan.edges import INDEX_BYTES
from hflow.plan.engine_registry import GenerationEngine, profile_of
from hflow.plan.flops import expert_parameters
from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Layout, Placement, Shard, SharedShard, num_parts
from hflow.plan.model_shape import ModelShape
from hflow.plan.pipeline_stages import stage_chunks
from hflow.plan.sharding import Sharding

# How often the bytes of weights are read and written while changed ones are found, or written, and a checksum
# is added up, in integers of eight bytes for each weight: of bf16 on CPUs (`benchmarks/delta_weights.py`).
SENT_PASSES, RECEIVED_PASSES = 14.0, 8.0

Masks = Mapping[int, int]


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
    A server copies what has arrived for it once more; on GPUs a further copy goes to the host's memory.

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


def weight_bytes(shape: ModelShape, dtype: str) -> tuple[int, int]:
    """Of what moves of a model, and of its experts alone."""
    experts = 0 if shape.adapter else expert_parameters(shape)
    return _num_moved(shape) * BYTES[dtype], experts * BYTES[dtype]


@lru_cache(maxsize=256)
def _num_moved(shape: ModelShape) -> int:
    return sum(parameter.size for parameter in moved_parameters(shape))


@lru_cache(maxsize=4096)
def includes(whole: Sharding, part: Sharding, num_layers: int) -> bool:
    """Whether each device has with `whole` all the weights of a model, and maybe more, that it has with
    `part`."""
    cells, experts = _cells(whole, part, num_layers), lcm(whole.ep, part.ep)
    wide, narrow = (_weight_masks(s, num_layers, *cells, experts) for s in (whole, part))
    return all(not mask & ~wide.get(device, 0) for device, mask in narrow.items())


@lru_cache(maxsize=65536)
def rows_s(rows: int, width: int, source: Layout, target: Layout, cluster: Cluster) -> float:
    """`rows` rows of `width` bytes each."""
    cells = lcm(_row_parts(source), _row_parts(target))
    held, needed = _row_cells(source, cells, cluster), _row_cells(target, cells, cluster)
    return redistribution_s(held, needed, rows * width / cells, cluster)


def redistribution_s(
    held: Cells, needed: Cells, cell_bytes: float, cluster: Cluster, sent: float = 1.0
) -> float:
    """Seconds until every device has the cells that it needs; from host to host a share `sent` of each is
    enough."""
    before = held.of_device
    most = max((mask & ~before.get(device, 0)).bit_count() for device, mask in needed.of_device.items())
    if not most:
        return 0.0
    link = reached(cluster, cluster.intra_host)
    seconds = most * cell_bytes / link.bandwidth + link.latency_s
    entering, leaving = _between_hosts(held.of_host, needed.of_host)
    if not entering:
        return seconds
    nics = reached(cluster, cluster.inter_host, cluster.nics_per_host)
    return seconds + sent * max(entering, leaving) * cell_bytes / nics.bandwidth + nics.latency_s


def _between_hosts(inside: Masks, needed: Masks) -> tuple[int, float]:
    """Cells that enter and that leave the busiest host."""
    entering = [mask & ~inside.get(host, 0) for host, mask in needed.items()]
    most = max(mask.bit_count() for mask in entering)
    return most, _leaving(inside.values(), filter(None, entering)) if most else 0.0


def _leaving(inside: Iterable[int], entering: Iterable[int]) -> float:
    """Cells that the busiest host sends, if the hosts that hold a cell share its copies equally. Cells that
    the same hosts hold and want are counted together, and so are hosts that hold or want the same."""
    holding, wanting = Counter(inside), Counter(entering)
    sent = dict.fromkeys(holding, 0.0)
    for cells in _parts((*wanting, *holding)):
        copies = sum(count for mask, count in wanting.items() if mask & cells)  # none of what nobody lacks
        holders = [mask for mask in holding if mask & cells] if copies else []
        shares = sum(map(holding.__getitem__, holders))
        for mask in holders:
            sent[mask] += cells.bit_count() * copies / shares
    return max(sent.values())


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
    """`experts`: the parts into which experts are cut; 1 for what every rank of dp has."""
    stages, slices = _cells(source, target, num_layers)
    held, needed = (_weight_cells(s, num_layers, stages, slices, experts, cluster) for s in (source, target))
    return redistribution_s(held, needed, size / (stages * experts * slices), cluster, sent)


def _cells(one: Sharding, other: Sharding, num_layers: int) -> tuple[int, int]:
    """The ranges of layers, and slices of each, of which parts of both consist: single layers, where a stage
    has fewer than another."""
    slices = lcm(*(s.mesh.tp * (s.mesh.dp if s.fully else 1) for s in (one, other)))
    parts = [s.mesh.pp * s.vpp for s in (one, other)]
    return num_layers if any(num_layers % count for count in parts) else lcm(*parts), slices


@lru_cache(maxsize=4096)
def _weight_cells(
    sharding: Sharding, num_layers: int, ranges: int, slices: int, experts: int, cluster: Cluster
) -> Cells:
    return Cells.on(cluster, _weight_masks(sharding, num_layers, ranges, slices, experts))


def _weight_masks(
    sharding: Sharding, num_layers: int, ranges: int, slices: int, experts: int
) -> dict[int, int]:
    """The cells (range of layers, part of the experts, slice) of each device, slices fastest."""
    mesh = sharding.mesh
    masks: dict[int, int] = {}
    known: dict[tuple[int, int, int], int] = {}
    parts = sharding.ep if experts > 1 else 1
    pieces = mesh.dp // parts if sharding.fully else 1  # of a shard, over the ranks of dp that share it
    for index, device in enumerate(mesh.devices):
        pp_dp, cp_tp = divmod(index, mesh.cp * mesh.tp)
        (pp, dp), tp = divmod(pp_dp, mesh.dp), cp_tp % mesh.tp
        at = (pp, dp % (parts * pieces), tp)
        if at not in known:
            column = _span(slices, mesh.tp * pieces, tp * pieces + dp // parts % pieces)
            block = _repeat(column, _range(experts, parts, dp % parts), slices)
            known[at] = _repeat(block, _chunks(num_layers, ranges, sharding, pp), experts * slices)
        masks[device] = known[at]
    return masks


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


def _chunks(num_layers: int, ranges: int, sharding: Sharding, stage: int) -> Iterator[int]:
    """Those of a stage's chunks of layers."""
    pp, vpp = sharding.mesh.pp, sharding.vpp
    if num_layers % (pp * vpp):
        return chain(*stage_chunks(num_layers, pp, stage))
    return chain.from_iterable(_range(ranges, pp * vpp, chunk) for chunk in range(stage, pp * vpp, pp))


def _range(cells: int, parts: int, index: int) -> range:
    size = cells // parts
    return range(index * size, (index + 1) * size)


def _span(cells: int, parts: int, index: int) -> int:
    """The bits of part `index` of `parts`."""
    size = cells // parts
    return ((1 << size) - 1) << (index * size)


def _repeat(mask: int, places: Iterable[int], width: int) -> int:
    """`mask` at each of `places`, which are `width` bits apart."""
    out = 0
    for place in places:
        out |= mask << (place * width)
    return out
