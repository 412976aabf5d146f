"""Lower one edge: from the layouts at both ends to copies, bytes, bounds and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hflow.cost.device import BYTES
from hflow.cost.redistribution import rows_s, sends_changed, weights_s
from hflow.graph.types import ValueType
from hflow.plan.cluster import Cluster
from hflow.plan.edges import Collective, CopySet, DataEdge, WeightEdge
from hflow.plan.frozen import moved_parameters
from hflow.plan.layout import Layout
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter, expert_part, stages_of, weight_boxes
from hflow.plan.reshard import Boxes, SendLoad, lower, lower_bound, received, recognise, volumes
from hflow.plan.sharding import Sharding

ELEMENT_BYTES = {"i16": 2, "i32": 4, "i64": 8, "f32": 4, "bf16": 2, "bool": 1, "str": 1}
STRING_BYTES = 16  # a guess: the length of strings is not part of their type


@dataclass(frozen=True)
class Lowered:
    """Copies and what they cost. Bytes are those of the busiest device."""

    collective: Collective
    copies: tuple[CopySet, ...]
    size_bytes: int
    bytes_per_device: int
    lower_bound_bytes_per_device: int
    peak_bytes: int
    time_s: float


@dataclass(frozen=True)
class UnloweredDataEdge:
    """Rows of several values of one producer, from its layout to that of a reader (`plan.edges.DataEdge`)."""

    name: str
    source: str
    target: str
    ports: tuple[str, ...]
    types: tuple[ValueType, ...]
    source_layout: Layout
    target_layout: Layout

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Of both ends."""
        meshes = self.source_layout.mesh, self.target_layout.mesh
        return tuple(sorted({device for mesh in meshes for device in mesh.devices}))

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        return {port: row_bytes(type_) for port, type_ in zip(self.ports, self.types)}

    def time_s(self, ports: Iterable[str], cluster: Cluster) -> float:
        """Of moving the values of some of the `ports`."""
        width = sum(self._row_bytes[port] for port in ports)
        return rows_s(self.types[0].rows, width, self.source_layout, self.target_layout, cluster)

    def lowered(self, cluster: Cluster) -> DataEdge:
        lowered = lower_rows(self.types, self.source_layout, self.target_layout, cluster)
        return DataEdge(
            name=self.name, source=self.source, target=self.target, ports=self.ports, types=self.types,
            source_layout=self.source_layout, target_layout=self.target_layout, **vars(lowered),
        )  # fmt: skip


@dataclass(frozen=True)
class UnloweredWeightEdge:
    """All weights of a model, from the devices that train it to those that read it (`plan.edges.WeightEdge`).

    `shared`: the reader uses the trainer's own weights. `changed`: the share of the weights that has changed
    since they were sent last, where the reader keeps those; None: all are sent.
    """

    name: str
    source: str
    target: str
    shape: ModelShape
    dtype: str
    source_sharding: Sharding
    target_sharding: Sharding
    shared: bool = False
    changed: float | None = None

    def time_s(self, cluster: Cluster) -> float:
        return weights_s(*self._moved(cluster), self.changed)

    def lowered(self, cluster: Cluster) -> WeightEdge:
        how = self._moved(cluster)
        lowered = replace(lower_weights(*how, self.shared), time_s=self.time_s(cluster))
        return WeightEdge(
            name=self.name, source=self.source, target=self.target, source_sharding=self.source_sharding,
            target_sharding=self.target_sharding, **vars(lowered),
            changed=self.changed if sends_changed(*how, self.changed) else None,
        )  # fmt: skip

    def _moved(self, cluster: Cluster) -> tuple[ModelShape, str, Sharding, Sharding, Cluster]:
        return self.shape, self.dtype, self.source_sharding, self.target_sharding, cluster


UnloweredEdge = UnloweredDataEdge | UnloweredWeightEdge


def row_bytes(type_: ValueType) -> int:
    """Bytes of one row, at the greatest length that the type admits. A kept set has its size with it."""
    if type_.dtype == "str":
        return STRING_BYTES
    per_row = ELEMENT_BYTES[type_.dtype]
    for number, dim in enumerate(type_.dims[1:]):
        per_row *= (dim.size or 1) + (dim.ragged and number > 0)
    return per_row


def lower_rows(types: tuple[ValueType, ...], source: Layout, target: Layout, cluster: Cluster) -> Lowered:
    """Values with equally many rows, which move together."""
    return _lower_rows(types[0].rows, sum(map(row_bytes, types)), source, target, cluster)


@lru_cache(maxsize=4096)
def _lower_rows(rows: int, width: int, source: Layout, target: Layout, cluster: Cluster) -> Lowered:
    """`width`: bytes of one row."""
    held, needed = source.boxes((rows,)), target.boxes((rows,))
    copies = lower(held, needed, cluster.host)
    collective = recognise(copies, held, needed)
    copy_set = CopySet(("rows",), (rows,), collective, copies)
    most = max(received(copies).values(), default=0) * width
    return Lowered(
        collective=collective,
        copies=(copy_set,) if copies else (),
        size_bytes=rows * width,
        bytes_per_device=most,
        lower_bound_bytes_per_device=max(lower_bound(held, needed).values(), default=0) * width,
        peak_bytes=_peak(held, needed, width),
        time_s=rows_s(rows, width, source, target, cluster),
    )


@lru_cache(maxsize=4096)
def lower_weights(
    shape: ModelShape, dtype: str, source: Sharding, target: Sharding, cluster: Cluster, shared: bool = False
) -> Lowered:
    """Between equal shardings nothing moves; where the weights are `shared`, they are held once.

    Else the reader's weights are a buffer of their own, even where a device's source box lies inside its
    target box: the peak counts both, as the runtime holds both while it copies.
    """
    assert source == target or not shared
    width = BYTES[dtype]
    sets: list[CopySet] = []
    load, got, bound, peak = SendLoad(), Counter[int](), Counter[int](), Counter[int]()
    for same, held, needed in _alike(shape, source, target):
        copies = lower(held, needed, cluster.host, load, len(same))
        names = tuple(p.name for p in same)
        sets.append(CopySet(names, same[0].shape, recognise(copies, held, needed), copies))
        for total, part in (
            (got, received(copies)),
            (bound, lower_bound(held, needed)),
            (peak, volumes(held)),
            (peak, {} if shared else volumes(needed)),
        ):
            total.update({device: count * len(same) for device, count in part.items()})
    moving = tuple(s for s in sets if s.copies)
    kinds: set[Collective] = {s.collective for s in moving} or {"alias"}
    return Lowered(
        collective=kinds.pop() if len(kinds) == 1 else "p2p",
        copies=moving,
        size_bytes=sum(p.size for p in moved_parameters(shape)) * width,
        bytes_per_device=max(got.values(), default=0) * width,
        lower_bound_bytes_per_device=max(bound.values(), default=0) * width,
        peak_bytes=max(peak.values()) * width,
        time_s=weights_s(shape, dtype, source, target, cluster),
    )


def _alike(
    shape: ModelShape, source: Sharding, target: Sharding
) -> Iterator[tuple[list[Parameter], Boxes, Boxes]]:
    """Parameters in groups of one shape and equal boxes (the same weight of several layers), which are
    lowered once."""
    tps = source.mesh.tp, target.mesh.tp
    groups: dict[tuple[object, ...], list[Parameter]] = defaultdict(list)
    for parameter in moved_parameters(shape):
        ends = (
            (stages_of(shape, end.mesh.pp, parameter, end.vpp), expert_part(shape, end.ep, parameter))
            for end in (source, target)
        )
        dim = parameter.shard if max(tps) > 1 else None
        parts = (parameter.parts(tp) for tp in tps)
        groups[parameter.shape, dim, parameter.expert is None, *parts, *ends].append(parameter)
    for same in groups.values():
        yield same, weight_boxes(shape, source, same[0]), weight_boxes(shape, target, same[0])


def _peak(held: Boxes, needed: Boxes, width: int) -> int:
    """Both boxes of the fullest device; one, where they are the same."""
    total = Counter(volumes(held))
    total.update({d: n for d, n in volumes(needed).items() if held.get(d) != needed[d]})
    return max(total.values()) * width
