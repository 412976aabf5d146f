"""Who holds which weights: a model's weights cut into equal cells, of which each device has a block.

A cell is a range of layers, a part of the experts and a slice of each matrix. A device has some ranges of
layers, of these some parts of the experts, and of these some slices: three sets of bits tell all its cells.
What the devices of a host have together may be no block: it is told stage by stage, as bits of parts of the
experts and slices, slices fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

from hflow.plan.cluster import Cluster
from hflow.plan.pipeline_stages import stage_chunks
from hflow.plan.sharding import Sharding

Masks = Mapping[int, int]  # bits, by device or by host


class WeightBlock(NamedTuple):
    """Bits of ranges of layers, of parts of the experts, and of slices."""

    layers: int
    experts: int
    slices: int

    @property
    def size(self) -> int:
        return self.layers.bit_count() * self.experts.bit_count() * self.slices.bit_count()

    def common(self, other: WeightBlock) -> WeightBlock:
        """The cells of both."""
        return WeightBlock(
            self.layers & other.layers, self.experts & other.experts, self.slices & other.slices
        )


class WeightBlocks(NamedTuple):
    """`distinct` ones, the first without any cell; the number of that of each device."""

    distinct: tuple[WeightBlock, ...]
    of_device: Mapping[int, int]

    def beside(self, other: WeightBlocks) -> Iterator[tuple[WeightBlock, WeightBlock]]:
        """Each device's block, and what it has of `other`."""
        pairs = {(number, other.of_device.get(device, 0)) for device, number in self.of_device.items()}
        return ((self.distinct[own], other.distinct[theirs]) for own, theirs in pairs)


class Grid(NamedTuple):
    """The numbers of ranges of layers, of parts of the experts, and of slices."""

    layers: int
    experts: int
    slices: int

    @property
    def size(self) -> int:
        return self.layers * self.experts * self.slices


def grid_of(one: Sharding, other: Sharding, num_layers: int, experts: int) -> Grid:
    """The cells of which parts of both consist: single layers, where a stage has fewer than another.

    Args:
        experts: the parts into which experts are cut; 1 for what every rank of dp has.
    """
    tps = [s.expert_tp if experts > 1 and not s.fully else s.mesh.tp for s in (one, other)]
    slices = lcm(*(tp * (s.mesh.dp if s.fully else 1) for tp, s in zip(tps, (one, other))))
    parts = [s.mesh.pp * s.vpp for s in (one, other)]
    return Grid(num_layers if any(num_layers % count for count in parts) else lcm(*parts), experts, slices)


@lru_cache(maxsize=4096)
def blocks(sharding: Sharding, num_layers: int, grid: Grid) -> WeightBlocks:
    """Those of the devices of `sharding`."""
    if sharding.whole_experts and grid.experts > 1:
        return _blocks_of_whole_experts(sharding, num_layers, grid)
    mesh, of_device = sharding.mesh, dict[int, int]()
    distinct, numbers = [WeightBlock(0, 0, 0)], dict[tuple[int, int, int], int]()
    parts = sharding.ep if grid.experts > 1 else 1
    pieces = mesh.dp // parts if sharding.fully else 1  # of a shard, over the ranks of dp that share it
    for index, device in enumerate(mesh.devices):
        pp_dp, cp_tp = divmod(index, mesh.cp * mesh.tp)
        (pp, dp), tp = divmod(pp_dp, mesh.dp), cp_tp % mesh.tp
        at = (pp, dp % (parts * pieces), tp)
        if at not in numbers:
            numbers[at] = len(distinct)
            layers = _bits(_chunks(num_layers, grid.layers, sharding, pp))
            experts = _range(grid.experts, parts, dp % parts)
            slices = _range(grid.slices, mesh.tp * pieces, tp * pieces + dp // parts % pieces)
            distinct.append(WeightBlock(layers, _bits(experts), _bits(slices)))
        of_device[device] = numbers[at]
    return WeightBlocks(tuple(distinct), of_device)


def _blocks_of_whole_experts(sharding: Sharding, num_layers: int, grid: Grid) -> WeightBlocks:
    """Those of experts that tp does not cut."""
    distinct, of_device = [WeightBlock(0, 0, 0)], dict[int, int]()
    for number, devices in enumerate(sharding.expert_replicas):
        stage, part = divmod(number, sharding.ep)
        layers = _bits(_chunks(num_layers, grid.layers, sharding, stage))
        experts = _bits(_range(grid.experts, sharding.ep, part))
        pieces = len(devices) if sharding.fully else 1
        of_device |= {device: len(distinct) + at % pieces for at, device in enumerate(devices)}
        for piece in range(pieces):
            distinct.append(WeightBlock(layers, experts, _bits(_range(grid.slices, pieces, piece))))
    return WeightBlocks(tuple(distinct), of_device)


@lru_cache(maxsize=4096)
def includes(whole: Sharding, part: Sharding, num_layers: int) -> bool:
    """Whether each device has with `whole` all the weights of a model, and maybe more, that it has with
    `part`."""
    experts = lcm(whole.ep, part.ep)
    # Who has the experts has the rest, unless they are cut in other ways.
    apart = whole.whole_experts or part.whole_experts
    return all(_includes(whole, part, num_layers, parts) for parts in ({1, experts} if apart else {experts}))


def _includes(whole: Sharding, part: Sharding, num_layers: int, experts: int) -> bool:
    """Of what is cut into so many parts of `experts`."""
    grid = grid_of(whole, part, num_layers, experts)
    wide, narrow = (blocks(sharding, num_layers, grid) for sharding in (whole, part))
    return all(not own.size or own.common(held) == own for own, held in narrow.beside(wide))


def most_missing(held: WeightBlocks, needed: WeightBlocks) -> int:
    """The most cells that any device needs and does not hold."""
    return max(own.size - own.common(there).size for own, there in needed.beside(held))


def on_hosts(
    held: Sharding, needed: Sharding, num_layers: int, grid: Grid, cluster: Cluster
) -> Iterator[tuple[int, Masks, Masks]]:
    """For each stage of the one end and of the other with layers in common: how many ranges, and which parts
    and slices of each of these the hosts hold and need."""
    inside, wanted = (_by_stage(end, num_layers, grid, cluster) for end in (held, needed))
    for own_layers, own in inside.items():
        for layers, of_hosts in wanted.items():
            if common := own_layers & layers:
                yield common.bit_count(), own, of_hosts


@lru_cache(maxsize=4096)
def _by_stage(sharding: Sharding, num_layers: int, grid: Grid, cluster: Cluster) -> Mapping[int, Masks]:
    """By the layers of a stage, what each host has of them."""
    own = blocks(sharding, num_layers, grid)
    masks = [_repeat(block.slices, block.experts, grid.slices) for block in own.distinct]
    found: dict[int, dict[int, int]] = {}
    for device, number in own.of_device.items():
        on_host, host = found.setdefault(own.distinct[number].layers, {}), cluster.host(device)
        on_host[host] = on_host.get(host, 0) | masks[number]
    return found


def _chunks(num_layers: int, ranges: int, sharding: Sharding, stage: int) -> Iterator[int]:
    """Those of a stage's chunks of layers."""
    pp, vpp = sharding.mesh.pp, sharding.vpp
    if num_layers % (pp * vpp):
        return chain(*stage_chunks(num_layers, pp, stage))
    return chain.from_iterable(_range(ranges, pp * vpp, chunk) for chunk in range(stage, pp * vpp, pp))


def _range(count: int, parts: int, index: int) -> range:
    """Part `index` of `parts` of so many numbers."""
    size = count // parts
    return range(index * size, (index + 1) * size)


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _repeat(mask: int, places: int, width: int) -> int:
    """`mask` at each of `places`, which are bits, `width` bits apart."""
    return sum(mask << (place * width) for place in range(places.bit_length()) if places >> place & 1)
