"""From a Hugging Face folder into a model: each rank reads only the parts that it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch

from hflow.graph.ir import Model
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import EMBEDDING, LORA_A, LORA_B, Parameter, parameters
from hflow.runtime.adapter_files import adapter_tensors
from hflow.runtime.engines.megatron.weights import PlacedWeights
from hflow.runtime.model_folder import unusable
from hflow.runtime.weight_files import LM_HEAD, StoredTensor, opened, read_box, stored_tensors


def load_safetensors(
    weights: PlacedWeights, model: Model, shape: ModelShape, seed: int = 0, there: Collection[str] = ()
) -> tuple[str, ...]:
    """Set all weights from ``model.safetensors``, or the files named by its index, in ``model.path``.

    An adapter is read from its own folder, with a scalar head, if it has one; without a folder it begins as
    `first_of_adapter` says. The scalar head of a model that is not frozen begins with zeros where no folder
    has one.

    Args:
        there: the parameters that have their values already.

    Returns:
        The parameters of this rank that were not read but set to zero.

    Raises:
        HflowError: HF406 when files or tensors are missing, unreadable, not what the model reads, or hold a
            number that is not finite.
    """
    of_adapter = adapter_tensors(model, shape)
    stored = stored_tensors(model, shape.base, beside=of_adapter) | of_adapter
    adapting = {p.name: p for p in parameters(shape) if p.name.endswith((LORA_A, LORA_B))}
    wanted: dict[Path, list[str]] = {}
    missing = [name for name in weights.names() if name not in there]
    for name in missing:
        if name in stored:
            wanted.setdefault(stored[name].file, []).append(name)
        elif name in adapting:
            first, box = first_of_adapter(adapting[name], seed), weights.box(name)
            weights.write(name, box, first[tuple(slice(*span) for span in box)])
        else:
            weights.write(name, weights.box(name), torch.zeros(()))
    for file, names in wanted.items():
        with opened(file) as tensors:
            for name in names:
                weights.write(name, weights.box(name), read_box(tensors, stored[name], weights.box(name)))
                _check_finite(weights, name, file)
    if shape.tied and LM_HEAD in stored and EMBEDDING in missing:
        _check_tied(stored, weights.box(EMBEDDING), model)
    return tuple(name for name in missing if name not in stored and name not in adapting)


def first_of_adapter(parameter: Parameter, seed: int) -> torch.Tensor:
    """What a matrix of an adapter begins with, float32: B with zeros, A with numbers that are uniform up to
    1 / sqrt(columns), as in PEFT. They follow from the seed of the graph and the name alone, so that every
    rank has its part of the same matrix."""
    if parameter.name.endswith(LORA_B):
        return torch.zeros(parameter.shape)
    named = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(named[:8], "little") >> 1)
    bound = parameter.shape[1] ** -0.5
    return torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)


def _check_tied(stored: dict[str, StoredTensor], box: Box, model: Model) -> None:
    """A tied model may have its output matrix in the file, too; another matrix would be passed over."""
    kinds = {(stored[name].dtype, stored[name].shape) for name in (EMBEDDING, LM_HEAD)}
    if len(kinds) > 1 or not torch.equal(*(_read(stored[name], box) for name in (EMBEDDING, LM_HEAD))):
        problem = f"model `{model.name}` is tied (config.json), but `{LM_HEAD}` differs from `{EMBEDDING}`"
        raise unusable(stored[LM_HEAD].file, problem, span=model.span)


def _read(found: StoredTensor, box: Box) -> torch.Tensor:
    with opened(found.file) as tensors:
        return read_box(tensors, found, box)


def _check_finite(weights: PlacedWeights, name: str, file: Path) -> None:
    """As it was written: a float32 number may be beyond bf16. The norm takes one pass and no memory."""
    values = weights.read(name, weights.box(name))
    if torch.linalg.vector_norm(values, dtype=torch.float32).isfinite() or values.isfinite().all():
        return
    place = (~values.isfinite()).nonzero()[0]
    where = [int(at) + start for at, (start, _) in zip(place, weights.box(name))]
    raise unusable(file, f"tensor `{name}` holds {float(values[tuple(place)])} at {where}")
