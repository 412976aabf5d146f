"""Other ways to bring Megatron's weights from a training layout to that of generation; see reshard.py.

Each is a function of a `Case` that prepares what can be prepared once and returns the action that moves the
weights, or None where the way cannot express the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# isort: off
import hflow.runtime.engines.megatron  # noqa: F401  (first: it lets Megatron run without CUDA)

# isort: on
from megatron.core.models.gpt import GPTModel
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hflow.plan.layout import Box, Mesh, intersect
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.worker.world import World

Action = Callable[[], Any]
Parts = list[tuple[str, Box]]


@dataclass(frozen=True)
class Case:
    """What one rank holds: both models and their weights, on the same devices."""

    shape: ModelShape
    train: Mesh
    generate: Mesh
    models: tuple[GPTModel, GPTModel]
    source: MegatronWeights
    target: MegatronWeights
    world: World

    def boxes(self, mesh: Mesh, rank: int) -> Parts:
        found = (
            (p.name, weight_boxes(self.shape, Sharding(mesh), p).get(rank)) for p in parameters(self.shape)
        )
        return [(name, box) for name, box in found if box is not None]

    def group(self, sets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], dist.ProcessGroup]:
        """This rank's set, and its group. Collective."""
        made = [(ranks, self.world.group(ranks)) for ranks in sets]
        return next((tuple(sorted(ranks)), group) for ranks, group in made if self.world.rank in ranks)


def gather_all(case: Case) -> Action:
    """All weights of a replica on every rank of it, in one all-gather; then each takes its part."""
    ranks, group = case.group(case.train.groups("pp", "tp"))
    held = [case.boxes(case.train, rank) for rank in ranks]
    sizes = [sum(_size(box) for _, box in parts) for parts in held]
    needed = dict(case.boxes(case.generate, case.world.rank))

    def action() -> None:
        mine = torch.zeros(max(sizes))
        for (name, box), part in _cut(mine, case.boxes(case.train, case.world.rank)):
            part.copy_(case.source.read(name, box))
        everything = torch.empty(len(ranks), max(sizes))
        dist.all_gather(list(everything), mine, group=group)
        for parts, row in zip(held, everything):
            for (name, box), part in _cut(row, parts):
                common = intersect(box, needed[name]) if name in needed else None
                if common:
                    inside = (slice(a - c, b - c) for (a, b), (c, _) in zip(common, box))
                    case.target.write(name, common, part[tuple(inside)])

    return action


def _size(box: Box) -> int:
    return torch.Size(stop - start for start, stop in box).numel()


def _cut(flat: Tensor, parts: Parts) -> Iterator[tuple[tuple[str, Box], Tensor]]:
    at = 0
    for name, box in parts:
        yield (name, box), flat[at : at + _size(box)].view([stop - start for start, stop in box])
        at += _size(box)


def micro_groups(case: Case) -> Action:
    """HybridFlow's scheme: an all-gather per parameter of Megatron in micro data-parallel groups, whose ranks
    together hold what each of them needs. Rows are received in place, columns and gate-up are copied."""
    sets = [[d for d in replica if set(_needs(case, d)) == set(_needs(case, first))]
            for replica in case.train.groups("pp", "tp") for first in replica]  # fmt: skip
    ranks, group = case.group(tuple(dict.fromkeys(tuple(sorted(s)) for s in sets)))
    names: dict[torch.nn.Parameter, Parts] = {}
    for name in case.source.names():
        names.setdefault(case.source.places[name].parameter, []).append((name, case.source.box(name)))
    # The same order on all stages: their layers, then what lies outside them, the largest first.
    order = sorted(names, key=lambda p: 0 if ".layers." in names[p][0][0] else 1 / p.numel())
    slots: list[list[Parts]] = [[] for _ in ranks]
    dist.all_gather_object(slots, [names[p] for p in order], group=group)
    mine = [parameter.data for parameter in order]

    def action() -> None:
        for number in range(max(map(len, slots))):
            own = mine[number] if number < len(mine) else None
            held = [parts[number] if number < len(parts) else [] for parts in slots]
            size = next(sum(_size(box) for _, box in parts) for parts in held if parts)
            landings = [_landing(case, parts, size) for parts in held]
            dist.all_gather([t for t, _ in landings], _flat(own, size), group=group)
            for parts, (arrived, in_place) in zip(held, landings):
                if not in_place and parts:
                    _write_fused(case, parts, arrived)

    return action


def _needs(case: Case, rank: int) -> Parts:
    return case.boxes(case.generate, rank)


def _flat(own: Tensor | None, size: int) -> Tensor:
    return torch.empty(size) if own is None else own.view(-1)


def _landing(case: Case, parts: Parts, size: int) -> tuple[Tensor, bool]:
    """Where a parameter of another rank lands, and whether that is its place."""
    views = [case.target.view(name, box) for name, box in parts]
    together = bool(views) and sum(v.numel() for v in views) == size
    if together and len(views) == 1 and views[0].is_contiguous() and views[0].dim() > 1:
        return views[0].view(-1), True
    if together and len(views) == 3:  # queries, keys and values of whole groups are consecutive rows
        first = views[0].storage_offset()
        fused = case.target.places[parts[0][0]].parameter.data.view(-1)
        return fused[first : first + size], True
    return torch.empty(size), False


def _write_fused(case: Case, parts: Parts, arrived: Tensor) -> None:
    for (name, box), part in _cut(arrived, parts):
        case.target.write(name, box, part)


def dtensor(case: Case) -> Action | None:
    """`DTensor.redistribute` of every parameter of Megatron, gate and up apart; to new tensors."""
    if case.train.pp != case.generate.pp:
        return None
    tp, micro = case.generate.tp, case.train.tp // case.generate.tp
    grid = init_device_mesh(
        "cpu", (case.train.pp, case.train.dp, tp, micro), mesh_dim_names=("p", "d", "t", "m")
    )
    mesh = grid["t", "m"]
    tensors: list[tuple[DTensor, list[Any]]] = []
    parameter: Any  # Megatron says on parameters how they are split
    for name, parameter in case.models[0].named_parameters():
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        for half in parameter.data.chunk(2) if "linear_fc1" in name else (parameter.data,):
            before = [Replicate(), Replicate()] if dim is None else [Shard(dim), Shard(dim)]
            after = [Replicate(), Replicate()] if dim is None else [Shard(dim), Replicate()]
            tensors.append((DTensor.from_local(half, mesh, before, run_check=False), after))

    def action() -> list[Tensor]:
        return [tensor.redistribute(mesh, after).to_local() for tensor, after in tensors]

    return action


class _OnCpu(GlooCopyService):
    """Megatron's own, without the CUDA stream that it makes but does not use."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gloo_pg = dist.new_group(backend="gloo")
        self.send_ops, self.recv_ops = [], []
        self._copy_stream = None


def swap(case: Case) -> Action:
    """`megatron.core.resharding.swap_model_weights`; its plan is made at the first call and kept."""
    service = _OnCpu()
    for model in case.models:
        for name, parameter in model.named_parameters():
            if "linear_fc1" in name:  # gate and up are two blocks of rows
                parameter.partition_stride = 2  # type: ignore[attr-defined]
    return lambda: swap_model_weights([case.models[0]], [case.models[1]], service)  # type: ignore[list-item]


WAYS: dict[str, Callable[[Case], Action | None]] = {
    "gather all": gather_all,
    "per-tensor all_gather": micro_groups,
    "DTensor": dtensor,
    "swap_model_weights": swap,
}
