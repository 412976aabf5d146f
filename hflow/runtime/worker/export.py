"""Write a trained model as an HF folder: one more resharding, to a mesh of one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.plan.edges import CopySet
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.origin import origin_files
from hflow.plan.parameters import Parameter, parameters, weight_boxes
from hflow.plan.plan import Plan
from hflow.plan.reshard import lower
from hflow.plan.sharding import Sharding
from hflow.runtime.adapter_export import adapter_export
from hflow.runtime.engines.protocol import Weights
from hflow.runtime.exported_template import exported_template
from hflow.runtime.hf import write_hf
from hflow.runtime.rows import TORCH_DTYPES
from hflow.runtime.worker.move_weights import move_weights
from hflow.runtime.worker.route import make_route
from hflow.runtime.worker.world import Peers, World


class _Whole:
    """`Weights` of one whole parameter."""

    def __init__(self, parameter: Parameter, dtype: torch.dtype, device: torch.device):
        self.name, self.changed = parameter.name, False
        self.tensor = torch.empty(parameter.shape, dtype=dtype, device=device)

    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def box(self, name: str) -> Box:
        return tuple((0, size) for size in self.tensor.shape)

    def view(self, name: str, box: Box) -> Tensor:
        return self.tensor[tuple(slice(*span) for span in box)]


def export_model(
    plan: Plan, name: str, weights: Weights | None, sharding: Sharding, folder: Path, world: World
) -> None:
    """Gather model `name`, of which each device of a mesh has its `weights`, as `sharding` says, on the first
    of them, one parameter at a time, and write it there.

    Collective over the mesh; other ranks, which have none, return at once.
    """
    if weights is None:
        return
    model, shape, mesh = plan.graph.model(name), plan.shapes[name], sharding.mesh
    peers = Peers(tuple(sorted(mesh.devices)), world.group(mesh.devices))
    tensors = _gathered(shape, sharding, weights, TORCH_DTYPES[model.weight_dtype], world, peers)
    if world.rank == mesh.devices[0]:
        more = {**origin_files(plan), **_template(plan)}
        write_hf(folder, Path(model.path), tensors, adapter_export(model, shape), more)
    else:
        for _ in tensors:
            pass


def _template(plan: Plan) -> dict[str, str]:
    """A run that has made all its steps is not ended for it."""
    try:
        return exported_template(plan.graph)
    except HflowError as error:
        warnings.warn(f"the export has the tokenizer's own chat template: {error}", stacklevel=1)
        return {}


def _gathered(
    shape: ModelShape, sharding: Sharding, weights: Weights, dtype: torch.dtype, world: World, peers: Peers
) -> Iterator[tuple[str, Tensor]]:
    writer = sharding.mesh.devices[0]
    for parameter in parameters(shape):
        held = weight_boxes(shape, sharding, parameter)
        copies = lower(held, {writer: tuple((0, size) for size in parameter.shape)})
        sets = (CopySet((parameter.name,), parameter.shape, "gather", copies),)
        target = _Whole(parameter, dtype, world.device) if world.rank == writer else None
        pairs = world.neighbours.pairs
        route = make_route(sets, shape, weights, target, world.rank, readable=pairs)
        move_weights(route, weights, target, dtype, world, peers)
        yield parameter.name, target.tensor.cpu() if target else torch.empty(0)
