"""Weights between real processes: every rank ends up with what its layout says, having received no more
than that, and held no more than both layouts and a round of messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hflow.compiler.lowering import UnloweredWeightEdge
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.edges import WeightEdge
from hflow.plan.layout import Box, Mesh, volume
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import make_groups
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.worker import route
from hflow.runtime.worker.cross_memory import Neighbours, meet
from hflow.runtime.worker.move_weights import move_weights
from hflow.runtime.worker.world import Peers, World
from tests.engines.processes import Pool

LINK = Link(1e9, 1e-4)
DEVICE = DeviceKind("cpu", "cpu", 1e11, 4 * 10**9, 1e10, 0.5, 1e-4)
CLUSTER = Cluster("test", DEVICE, 2, 2, LINK, LINK)  # two hosts: copies are relayed
SHAPE = ModelShape("qwen2", 4, 16, 4, 2, 4, 24, 12, 64, 1e4, 1e-6, True, True)
MESHES = {
    "pp2 tp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "dp2 tp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "tp4": Mesh.of((0, 1, 2, 3), tp=4),  # two ranks with each key-value head
    "dp4": Mesh.of((0, 1, 2, 3), dp=4),
    "dp4 regrouped": Mesh.of((0, 2, 1, 3), dp=4),
    "pp4": Mesh.of((0, 1, 2, 3), pp=4),
    "tp2 @0-1": Mesh.of((0, 1), tp=2),
    "dp2 @2-3": Mesh.of((2, 3), dp=2),
}


def ranks_of(edge: WeightEdge) -> tuple[int, ...]:
    return tuple(sorted({*edge.source_mesh.devices, *edge.target_mesh.devices}))


def values_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole parameter, in one process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def boxes_of(shape: ModelShape, mesh: Mesh, rank: int) -> Iterator[tuple[str, tuple[int, ...], Box]]:
    """What a rank holds: name, shape of the whole, box."""
    for parameter in parameters(shape):
        box = weight_boxes(shape, Sharding(mesh), parameter).get(rank)
        if box is not None:
            yield parameter.name, parameter.shape, box


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


class Boxes:
    """`Weights` as dense tensors of whole parameters; what is not held is nan."""

    changed = False

    def __init__(self, mesh: Mesh, rank: int, fill: bool, shape: ModelShape = SHAPE):
        self.boxes = {name: box for name, _, box in boxes_of(shape, mesh, rank)}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, shape_, box in boxes_of(shape, mesh, rank):
            self.tensors[name] = torch.full(shape_, torch.nan)
            if fill:
                self.tensors[name][index(box)] = values_of(name, shape_)[index(box)]

    def names(self) -> tuple[str, ...]:
        return tuple(self.boxes)

    def box(self, name: str) -> Box:
        return self.boxes[name]

    def view(self, name: str, box: Box) -> torch.Tensor:
        return self.tensors[name][index(box)]


def move(
    edge: WeightEdge,
    shape: ModelShape,
    source: Any,
    target: Any,
    rank: int,
    new_group: Any,
    neighbours: Neighbours | None = None,
) -> int:
    """Bytes received."""
    peers = Peers(ranks_of(edge), new_group(ranks_of(edge)))
    if rank not in peers.ranks:
        return 0
    world = World(rank, 4, torch.device("cpu"), neighbours)
    pairs = world.neighbours.pairs
    mine = route.make_route(edge.copies, shape, source, target, rank, readable=pairs)
    return move_weights(mine, source, target, torch.float32, world, peers).values


LIMITS = [(0, 2**24), (64, 2**24), (2**14, 300)]  # all parts alone; small ones packed; many rounds
HOST_OF = (0, 0, 1, 1)


def on_rank(rank: int, new_group: Any, edge: WeightEdge) -> list[tuple[int, int]]:
    """Bytes received, and elements of the target's boxes that came out wrong: over sockets for each of
    `LIMITS`; read from neighbours' memory; and read within a host, over sockets between hosts."""
    found: list[tuple[int, int]] = []
    for route.SMALL_ELEMENTS, route.ROUND_ELEMENTS in LIMITS:
        found.append(moved(rank, new_group, edge, None))
    all_ = meet(rank, 4)
    assert len(all_.pairs) == 12, "this system does not let processes read each other's memory"
    near = frozenset((a, b) for a, b in all_.pairs if HOST_OF[a] == HOST_OF[b])
    found.append(moved(rank, new_group, edge, all_))
    found.append(moved(rank, new_group, edge, Neighbours(all_.pids, near)))
    return found


def moved(rank: int, new_group: Any, edge: WeightEdge, neighbours: Neighbours | None) -> tuple[int, int]:
    source = Boxes(edge.source_mesh, rank, True) if rank in edge.source_mesh.devices else None
    target = Boxes(edge.target_mesh, rank, False) if rank in edge.target_mesh.devices else None
    received = move(edge, SHAPE, source, target, rank, new_group, neighbours)
    if not target:
        return received, 0
    assert target.changed
    return received, sum(
        int((target.view(name, box) != values_of(name, shape)[index(box)]).sum())
        for name, shape, box in boxes_of(SHAPE, edge.target_mesh, rank)
    )


def planned_bytes(edge: WeightEdge, rank: int) -> int:
    """What the plan's copies bring to a rank; fp32."""
    copies = [(len(s.tensors), c) for s in edge.copies for c in s.copies if c.target == rank]
    return 4 * sum(count * volume(copy.box) for count, copy in copies)


@pytest.mark.matrix
@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", ["pp2 tp2", "dp2 tp2", "tp4", "pp4", "tp2 @0-1"])
def test_between_any_meshes(pool: Pool, source: str, target: str) -> None:
    ends = Sharding(MESHES[source]), Sharding(MESHES[target])
    edge = UnloweredWeightEdge("w", "a", "b", SHAPE, "f32", *ends).lowered(CLUSTER)
    expected = [(planned_bytes(edge, rank), 0) for rank in range(4)]
    assert pool.run(4, on_rank, edge) == [[found] * (len(LIMITS) + 2) for found in expected]
    assert max(received for received, _ in expected) == edge.bytes_per_device
    assert edge.bytes_per_device == edge.lower_bound_bytes_per_device


LLAMA = ModelShape("llama", 2, 256, 8, 4, 32, 704, 256, 64, 1e4, 1e-6, False, False)  # 256 x 256: also q_proj
ROUND = 2**15  # elements; a model of two megabytes moves in many rounds
TOLD_BYTES = 2**14  # where the parts of a model lie


def megatron(mesh: Mesh, rank: int, new_group: Any, shape: ModelShape = LLAMA) -> MegatronWeights | None:
    groups = make_groups(Sharding(mesh), rank, new_group)
    if groups is None:
        return None
    return MegatronWeights(
        build_model(shape, mesh, "f32", groups, torch.device("cpu")), shape, Sharding(mesh), rank
    )


def peak_on_rank(rank: int, new_group: Any, edge: WeightEdge, near: bool) -> tuple[int, int, int]:
    """Bytes received, bytes that torch's allocator gave out at most while the weights moved into memory
    that was free before, and wrong elements.

    Args:
        near: ranks read each other's memory.
    """
    neighbours = meet(rank, 4) if near else None
    route.SMALL_ELEMENTS, route.ROUND_ELEMENTS = 2**8, ROUND
    source, target = (megatron(mesh, rank, new_group) for mesh in (edge.source_mesh, edge.target_mesh))
    assert source and target
    for name, shape, box in boxes_of(LLAMA, edge.source_mesh, rank):
        source.write(name, box, values_of(name, shape)[index(box)])
    target.release()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        target.allocate()
        received = move(edge, LLAMA, source, target, rank, new_group, neighbours)
    wrong = sum(
        int((target.read(name, box) != values_of(name, shape)[index(box)]).sum())
        for name, shape, box in boxes_of(LLAMA, edge.target_mesh, rank)
    )
    return received, _most_allocated(measured), wrong


def _most_allocated(measured: profile) -> int:
    """Bytes, of all that was allocated meanwhile."""
    profiler: Any = measured.profiler
    events = profiler.kineto_results.events()
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Mesh.of((0, 1, 2, 3), tp=4), Mesh.of((0, 2, 1, 3), dp=2, tp=2)),
        (Mesh.of((0, 1, 2, 3), tp=4), Mesh.of((0, 1, 2, 3), dp=4)),
        (Mesh.of((0, 1, 2, 3), pp=2, tp=2), Mesh.of((0, 1, 2, 3), dp=2, tp=2)),
        (Mesh.of((0, 1, 2, 3), dp=4), Mesh.of((0, 1, 2, 3), tp=4)),
    ],
    ids=["tp4 to tp2", "tp4 to dp4", "pp2tp2 to tp2", "dp4 to tp4"],
)
def test_peak_is_both_layouts_and_a_round(pool: Pool, source: Mesh, target: Mesh) -> None:
    """Of Megatron's own weights: what is allocated besides the source is the target and, at most, a copy of
    every message of a round; between neighbours, nothing but who reads what."""
    one_host = Cluster("test", DEVICE, 1, 4, LINK, LINK)
    ends = Sharding(source), Sharding(target)
    edge = UnloweredWeightEdge("w", "a", "b", LLAMA, "f32", *ends).lowered(one_host)
    largest = 4 * max((volume(c.box) for s in edge.copies for c in s.copies), default=0)
    for near, more in (False, max(4 * ROUND, largest)), (True, TOLD_BYTES):
        for rank, (received, most, wrong) in enumerate(pool.run(4, peak_on_rank, edge, near)):
            needed = 4 * sum(volume(box) for _, _, box in boxes_of(LLAMA, target, rank))
            assert (received, wrong) == (planned_bytes(edge, rank), 0)
            assert needed <= most <= needed + more


def from_megatron(rank: int, new_group: Any, edge: WeightEdge, shape: ModelShape) -> list[int]:
    """Elements that came out wrong in another engine's memory, where queries lie together: over sockets, and
    read."""
    source = megatron(edge.source_mesh, rank, new_group, shape)
    assert source
    for name, whole, box in boxes_of(shape, edge.source_mesh, rank):
        source.write(name, box, values_of(name, whole)[index(box)])
    found: list[int] = []
    for neighbours in (None, meet(rank, 4)):
        target = Boxes(edge.target_mesh, rank, False, shape)
        move(edge, shape, source, target, rank, new_group, neighbours)
        of_parts = boxes_of(shape, edge.target_mesh, rank)
        pairs = (
            (target.view(name, box), values_of(name, whole)[index(box)]) for name, whole, box in of_parts
        )
        found.append(sum(int((mine != wanted).sum()) for mine, wanted in pairs))
    return found


@pytest.mark.parametrize("target", ["dp4 regrouped", "dp2 tp2"])
@pytest.mark.parametrize(
    ("source", "kv_heads"), [("dp4", 4), ("dp2 tp2", 4), ("pp2 tp2", 4), ("tp4", 4), ("tp4", 2), ("tp4", 1)]
)
def test_into_another_engine(pool: Pool, source: str, kv_heads: int, target: str) -> None:
    """Megatron interleaves queries, keys and values; copies of a shape may be of other parameters too."""
    ends = Sharding(MESHES[source]), Sharding(MESHES[target])
    one_host = Cluster("test", DEVICE, 1, 4, LINK, LINK)
    shape = replace(LLAMA, num_kv_heads=kv_heads)
    edge = UnloweredWeightEdge("w", "a", "b", shape, "f32", *ends).lowered(one_host)
    assert pool.run(4, from_megatron, edge, shape) == [[0, 0]] * 4
