"""Where each piece of a value lives on a mesh.

A transfer protocol in HybridFlow's sense is a pair of layouts; `reshard.py` derives the copies
between any two. The vocabulary: a *mesh* is an ordered set of devices with named axes; a *layout*
says for every axis whether the value is split along it (`Shard`; `SharedShard`, where neighbours have the
same part), repeated (`Replicate`) or present at one index only (`Only`); a *box* is the half-open index
range a device holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from hflow.plan.cached_hash import CachedHash
from hflow.units import device_text

Range = tuple[int, int]
Box = tuple[Range, ...]


@dataclass(frozen=True)
class Mesh(CachedHash):
    """Devices in row-major order of `axes` (the last axis varies fastest).

    hflow's axes are ``pp`` (pipeline), ``dp`` (data), ``cp`` (context) and ``tp`` (tensor), in that order:
    Megatron's rank order tp-cp-dp-pp. There is no axis ``cp`` where rows are not cut.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        assert prod(size for _, size in self.axes) == len(self.devices) == len(set(self.devices)), self

    @staticmethod
    def of(devices: tuple[int, ...], pp: int = 1, dp: int = 1, tp: int = 1, cp: int = 1) -> Mesh:
        context = (("cp", cp),) if cp > 1 else ()
        return Mesh(devices, (("pp", pp), ("dp", dp), *context, ("tp", tp)))

    def size(self, axis: str) -> int:
        return self._by_axis.get(axis, 1)

    @cached_property
    def _by_axis(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def pp(self) -> int:
        return self.size("pp")

    @cached_property
    def dp(self) -> int:
        return self.size("dp")

    @cached_property
    def cp(self) -> int:
        return self.size("cp")

    @cached_property
    def tp(self) -> int:
        return self.size("tp")

    @cached_property
    def copies(self) -> int:
        """How many devices hold the same part of the weights, where nothing splits them over dp."""
        return self.dp * self.cp

    @cached_property
    def consecutive(self) -> bool:
        """Whether the devices are neighbours in rising order."""
        first = self.devices[0]
        return self.devices == tuple(range(first, first + len(self.devices)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.axes))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.devices, product(*(range(size) for _, size in self.axes))))

    def coordinates(self, device: int) -> dict[str, int]:
        """Index of `device` on every axis."""
        return {name: index for (name, _), index in zip(self.axes, self._coordinates[device])}

    def replica(self, stage: int, index: int) -> tuple[int, ...]:
        """The devices of one pipeline stage of one data-parallel replica, by their ranks of cp and tp."""
        assert self.has_plan_axes
        size = self.cp * self.tp
        first = (stage * self.dp + index) * size
        return self.devices[first : first + size]

    @property
    def has_plan_axes(self) -> bool:
        """Whether its axes are those of `of`."""
        return self.axes == Mesh.of(self.devices, self.pp, self.dp, self.tp, self.cp).axes

    def joined(self, neighbours: int) -> Mesh:
        """The same devices; `neighbours` replicas become one, along whose tp lie all their devices."""
        inner = neighbours * self.cp * self.tp
        return Mesh.of(self.devices, pp=self.pp, dp=self.dp // neighbours, tp=inner)

    def groups(self, *along: str) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that differ only in the axes `along`, in mesh order."""
        fixed = [i for i, (name, _) in enumerate(self.axes) if name not in along]
        found: dict[tuple[int, ...], list[int]] = {}
        for device, at in self._coordinates.items():
            found.setdefault(tuple(at[i] for i in fixed), []).append(device)
        return tuple(map(tuple, found.values()))

    def __str__(self) -> str:
        return f"{self.sizes_text} @{device_text(self.devices)}"

    @property
    def short_text(self) -> str:
        """``dp8 tp2 @0-15 regrouped``: without the order of the devices, which may take lines."""
        ascending = tuple(sorted(self.devices))
        return f"{self.sizes_text} @{device_text(ascending)}" + " regrouped" * (ascending != self.devices)

    @property
    def sizes_text(self) -> str:
        """``dp8 tp2``: without the devices."""
        return " ".join(f"{name}{size}" for name, size in self.axes if size > 1) or "dp1"


@dataclass(frozen=True)
class Shard:
    """Split dim `dim` into contiguous parts, in multiples of `unit` (a group's rows stay together)."""

    dim: int
    unit: int = 1
    kind: Literal["shard"] = "shard"


@dataclass(frozen=True)
class SharedShard:
    """Split as `Shard` says, into fewer parts than the axis has indices: `neighbours` have each of them."""

    dim: int
    unit: int
    neighbours: int
    kind: Literal["shared_shard"] = "shared_shard"


@dataclass(frozen=True)
class Replicate:
    kind: Literal["replicate"] = "replicate"


@dataclass(frozen=True)
class Only:
    """Present at one index of the axis."""

    index: int
    kind: Literal["only"] = "only"


Placement = Shard | SharedShard | Replicate | Only


def num_parts(placement: Placement, size: int) -> int:
    """Into how many parts a placement splits a value along an axis of `size`."""
    if isinstance(placement, SharedShard):
        return size // placement.neighbours
    return size if isinstance(placement, Shard) else 1


@dataclass(frozen=True)
class Layout(CachedHash):
    """One placement per mesh axis, in the mesh's axis order."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.placements))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    def __post_init__(self) -> None:
        assert len(self.placements) == len(self.mesh.axes)

    def boxes(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """The box each device holds of a value of `shape`; devices without a piece are absent."""
        boxes: list[Box | None] = [tuple((0, extent) for extent in shape)]
        for (_, size), placement in zip(self.mesh.axes, self.placements):
            parts = {box: _parts(box, size, placement) for box in set(boxes)}  # many devices hold the same
            boxes = [part for box in boxes for part in parts[box]]
        return {device: box for device, box in zip(self.mesh.devices, boxes) if box is not None}

    def __str__(self) -> str:
        axes = zip(self.mesh.axes, self.placements)
        parts = [(axis, num_parts(p, size)) for (axis, size), p in axes]
        marks = [f"{axis}{count}" for axis, count in parts if count > 1]
        return f"{' '.join(marks) or 'whole'} @{device_text(self.mesh.devices)}"


def _parts(box: Box | None, size: int, placement: Placement) -> list[Box | None]:
    """What is left of `box` at each index of an axis of `size`."""
    if box is None or isinstance(placement, Replicate):
        return [box] * size
    if isinstance(placement, Only):
        return [box if index == placement.index else None for index in range(size)]
    parts = num_parts(placement, size)
    return [cut(box, placement.dim, parts, index * parts // size, placement.unit) for index in range(size)]


def cut(box: Box, dim: int, parts: int, index: int, unit: int = 1) -> Box:
    """Part `index` of `parts` nearly equal parts of `box` along `dim` (see `split`)."""
    return (*box[:dim], split(box[dim], parts, index, unit), *box[dim + 1 :])


def split(span: Range, parts: int, index: int, unit: int = 1) -> Range:
    """Part `index` of `parts` nearly equal parts of `span`, cut at multiples of `unit`."""
    start, stop = span
    units = (stop - start) // unit
    assert units * unit == stop - start, (span, unit)
    first, last = (i * units // parts for i in (index, index + 1))
    return start + first * unit, start + last * unit


def volume(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when it is empty."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b))
    return both if all(start < stop for start, stop in both) else None
