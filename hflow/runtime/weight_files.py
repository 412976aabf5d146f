"""The safetensors files of a model folder: which tensor lies in which, and whether they are the model's.

All is read from the heads of the files, on every device alike, before a weight is set.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.ir import Model
from hflow.plan.digests import INDEX, SINGLE
from hflow.plan.file_tensors import WHOLE, FilePlace, FileTensor, file_tensors
from hflow.plan.layout import Box, Range
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import SCALAR_HEAD
from hflow.runtime.model_folder import check_files, read_object, unusable
from hflow.runtime.mxfp4 import BLOCK, PACKED, unpacked

LM_HEAD = "lm_head.weight"
DTYPES = ("F64", "F32", "F16", "BF16")
# Angles that follow from config.json, which older versions of transformers wrote.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
VALUE_HEAD = "v_head."  # of TRL: beside a language model, of no use to it
BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a tensor that is stored as MXFP4


@dataclass(frozen=True)
class StoredTensor:
    """A parameter of this `shape`, which lies at a `place` of the file's tensor `name`. `scales`: those of a
    tensor that is stored as MXFP4, with rows as rows."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    place: FilePlace = WHOLE
    scales: StoredTensor | None = None


def stored_tensors(model: Model, shape: ModelShape, beside: Collection[str] = ()) -> dict[str, StoredTensor]:
    """What lies in the folder of `model`, by the name of the parameter: all that it reads, but for a scalar
    head that begins anew, and nothing that would be passed over without a word. Of those `beside`, which lie
    in another folder, none is missed.

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
    harmless = {name: found for name, found in stored.items() if _is_harmless(name, model)}
    found: dict[str, StoredTensor] = {}
    for tensor in file_tensors(shape):
        if tensor.name in stored:
            _check(stored[tensor.name], tensor.name, tensor.shape)
            found |= _parts(tensor, stored[tensor.name])
        elif tensor.stacked and tensor.name + BLOCKS in stored:
            found |= _packed_parts(tensor, stored, model)
        elif tensor.name not in beside and (tensor.name != SCALAR_HEAD or model.frozen):
            raise missing(folder, tensor.name, model)
    _refuse_unread(stored, found.values(), model, shape)
    return harmless | found


def _parts(tensor: FileTensor, whole: StoredTensor) -> dict[str, StoredTensor]:
    """Where each parameter of a tensor lies."""
    return {part.name: replace(whole, shape=part.shape, place=place) for part, place in tensor.parts}


def _packed_parts(
    tensor: FileTensor, stored: Mapping[str, StoredTensor], model: Model
) -> dict[str, StoredTensor]:
    """The same of one that is stored as MXFP4."""
    blocks = stored[tensor.name + BLOCKS]
    if tensor.name + SCALES not in stored:
        raise missing(blocks.file, tensor.name + SCALES, model)
    experts, columns, rows = tensor.shape
    if columns % BLOCK:
        raise unusable(blocks.file, f"tensor `{blocks.name}`: {columns} columns are no multiple of {BLOCK}")
    scales = stored[tensor.name + SCALES]
    _check(blocks, blocks.name, (experts, rows, columns // BLOCK, PACKED), ("U8",))
    _check(scales, scales.name, (experts, rows, columns // BLOCK), ("U8",))
    whole = replace(blocks, scales=scales)
    places = tuple((part, replace(place, transposed=False)) for part, place in tensor.parts)
    return _parts(replace(tensor, parts=places), whole)


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
        return read_box(tensors, found, tuple((0, size) for size in found.shape))


def read_box(tensors: Any, found: StoredTensor, box: Box) -> Tensor:
    """A `box` of a parameter, of the open file that it lies in; in float32 where that holds MXFP4."""
    (first, last), *columns = box
    if found.scales is None:
        return _read(tensors, found, (first, last), columns)
    ((start, stop),) = columns
    blocks = start // BLOCK, -(-stop // BLOCK)
    packed = _read(tensors, found, (first, last), [blocks])
    with opened(found.scales.file) as others:
        scales = _read(others, replace(found, name=found.scales.name), (first, last), [blocks])
    return unpacked(packed, scales)[:, start - blocks[0] * BLOCK : stop - blocks[0] * BLOCK]


def _read(tensors: Any, found: StoredTensor, rows: Range, columns: Sequence[Range]) -> Tensor:
    """Rows of a parameter, and of these some columns."""
    place, (first, last) = found.place, rows
    spans = [(place.start + first * place.step, place.start + (last - 1) * place.step + 1), *columns]
    spans = spans[::-1] if place.transposed else spans
    outer = [] if place.expert is None else [slice(place.expert, place.expert + 1)]
    values = tensors.get_slice(found.name)[(*outer, *(slice(*span) for span in spans))]
    values = values[0] if outer else values
    return (values.T if place.transposed else values)[:: place.step]


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


def _check(found: StoredTensor, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = DTYPES) -> None:
    if found.dtype not in dtypes:
        problem = f"tensor `{name}` is {found.dtype}; weights are one of {', '.join(dtypes)}"
        help_ = "quantized weights are not supported" if dtypes == DTYPES else ""
        raise unusable(found.file, problem, help_)
    if found.shape != shape:
        raise unusable(found.file, f"tensor `{name}` has shape {found.shape}, asked for is {shape}")


def _refuse_unread(
    stored: Mapping[str, StoredTensor], found: Iterable[StoredTensor], model: Model, shape: ModelShape
) -> None:
    read = {part.name for tensor in found for part in (tensor, tensor.scales) if part}
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
