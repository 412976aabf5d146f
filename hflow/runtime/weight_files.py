"""The safetensors files of a model folder: which tensor lies in which, and whether they are the model's.

All is read from the heads of the files, on every device alike, before a weight is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.ir import Model
from hflow.plan.digests import INDEX, SINGLE
from hflow.plan.file_tensors import FileTensor, file_tensors
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import SCALAR_HEAD
from hflow.runtime.model_folder import check_files, read_object, unusable

LM_HEAD = "lm_head.weight"
DTYPES = ("F64", "F32", "F16", "BF16")
# Angles that follow from config.json, which older versions of transformers wrote.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
VALUE_HEAD = "v_head."  # of TRL: beside a language model, of no use to it


@dataclass(frozen=True)
class StoredTensor:
    """A parameter, whose rows are those of the file's tensor `name` from row `start` on; `shape`: its own."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0


def stored_tensors(model: Model, shape: ModelShape) -> dict[str, StoredTensor]:
    """What lies in the folder of `model`, by the name of the parameter: all that it reads, but for a scalar
    head that begins anew, and nothing that would be passed over without a word.

    Raises:
        HflowError: HF406 when files or tensors are missing, unreadable, of another shape or no floats, or of
            a model with another head, and for tensors that the model does not read.
    """
    folder = Path(model.path)
    check_files(folder)
    stored = _single(folder) if (folder / SINGLE).exists() else _indexed(folder)
    if model.head == "lm" and SCALAR_HEAD in stored and LM_HEAD not in stored:
        problem = f"model `{model.name}` has a scalar head in its folder, and predicts no tokens"
        raise unusable(folder, problem, "write `head: scalar`", model.span)
    read = file_tensors(shape)
    for tensor in read:
        if tensor.name in stored:
            _check(stored[tensor.name], tensor.name, tensor.shape)
        elif tensor.name != SCALAR_HEAD or model.frozen:
            raise missing(folder, tensor.name, model)
    _refuse_unread(stored, model, shape)
    beside = {name: found for name, found in stored.items() if _is_harmless(name, model)}
    return beside | _parts(read, stored)


def _parts(read: Iterable[FileTensor], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Where each parameter lies."""
    found: dict[str, StoredTensor] = {}
    for tensor in (tensor for tensor in read if tensor.name in stored):
        start = 0
        for part in tensor.parts:
            found[part.name] = replace(stored[tensor.name], shape=part.shape, start=start)
            start += part.shape[0]
    return found


def missing(path: Path, name: str, model: Model) -> HflowError:
    """There is no tensor `name`, which `model` needs."""
    head = f"a reward model's folder has the tensor `{SCALAR_HEAD}`; a language model's has none"
    problem = f"there is no tensor `{name}`, which model `{model.name}` needs"
    return unusable(path, problem, head if name == SCALAR_HEAD else "", model.span)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The tensors of a file. Raises HflowError HF406 when it cannot be read, here or inside."""
    try:
        with safe_open(file, framework="pt") as tensors:  # type: ignore[no-untyped-call]
            yield tensors
    except (OSError, SafetensorError, MemoryError) as error:  # a whole file is mapped into memory
        raise unusable(file, str(error)) from error


def read_tensor(found: StoredTensor) -> Tensor:
    """The whole of a parameter. Raises HflowError HF406 when it cannot be read."""
    with opened(found.file) as tensors:
        return tensors.get_slice(found.name)[found.start : found.start + found.shape[0]]


def _single(folder: Path) -> dict[str, StoredTensor]:
    with opened(folder / SINGLE) as tensors:
        return _heads(tensors, folder / SINGLE)


def _heads(tensors: Any, file: Path) -> dict[str, StoredTensor]:
    parts = ((name, tensors.get_slice(name)) for name in tensors.keys())  # noqa: SIM118  (it is no mapping)
    return {name: StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts}


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """Files and index must say the same: else one of two tensors would be taken, or none."""
    if not (folder / INDEX).exists():
        raise unusable(folder, f"there is neither {SINGLE} nor {INDEX}")
    file_of = _weight_map(folder)
    stored: dict[str, StoredTensor] = {}
    files = sorted(set(file_of.values()))
    for file in files:
        if not (folder / file).is_file():
            raise unusable(folder / INDEX, f"there is no file `{file}`")
    for file in files:
        with opened(folder / file) as tensors:
            found = _heads(tensors, folder / file)
        for name in (n for n in found if file_of.get(n) != file):
            there = f"in `{file_of[name]}`" if name in file_of else "nowhere"
            raise unusable(folder / file, f"tensor `{name}` is here; {INDEX} has it {there}")
        stored |= found
    for name in file_of.keys() - stored.keys():
        raise unusable(folder / file_of[name], f"there is no tensor `{name}`, which {INDEX} promises")
    return stored


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, inside the folder."""
    index = folder / INDEX
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict):
        raise unusable(index, "no index of tensors: there is no object `weight_map`")
    for name, file in found.items():
        if not isinstance(file, str) or not file:
            raise unusable(index, f"the file of tensor `{name}` is {file!r}, no name of a file")
        if "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise unusable(index, f"the file of tensor `{name}` is {file!r}, outside the folder")
    return found


def _check(found: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
    if found.dtype not in DTYPES:
        problem = f"tensor `{name}` is {found.dtype}; weights are one of {', '.join(DTYPES)}"
        raise unusable(found.file, problem, "quantized weights are not supported")
    if found.shape != shape:
        raise unusable(found.file, f"tensor `{name}` has shape {found.shape}, asked for is {shape}")


def _refuse_unread(stored: Mapping[str, StoredTensor], model: Model, shape: ModelShape) -> None:
    read = {tensor.name for tensor in file_tensors(shape)}
    unread = sorted(name for name in stored.keys() - read if not _is_harmless(name, model))
    if not unread:
        return
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    problem = f"model `{model.name}` does not read tensor `{unread[0]}`{more}"
    layers = _layers(unread)
    help_ = (
        f"config.json says {shape.num_layers} layers, the file has {layers}"
        if layers > shape.num_layers
        else ""
    )
    raise unusable(stored[unread[0]].file, problem, help_, model.span)


def _is_harmless(name: str, model: Model) -> bool:
    """Whether folders have such a tensor beside what the model reads: the output matrix of a tied model, the
    head that the model was given before or after this one, or what follows from config.json."""
    of_other_head = name in (LM_HEAD, SCALAR_HEAD) or (name.startswith(VALUE_HEAD) and model.head == "lm")
    return of_other_head or DERIVED.fullmatch(name) is not None


def _layers(names: Iterable[str]) -> int:
    numbers = (re.match(r"model\.layers\.(\d{1,9})\.", name) for name in names)
    return max((int(found[1]) + 1 for found in numbers if found), default=0)
