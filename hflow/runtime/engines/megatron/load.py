"""From a Hugging Face folder into a model: each rank reads only the parts that it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hflow.compiler.layout import Box
from hflow.compiler.weights import SCALAR_HEAD
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.graph import Model
from hflow.runtime.engines.megatron.weights import MegatronWeights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"


def load_safetensors(weights: MegatronWeights, model: Model) -> tuple[str, ...]:
    """Set all weights from ``model.safetensors``, or the files named by its index, in ``model.path``.

    The scalar head of a model that is not frozen begins with zeros where the folder has none.

    Returns:
        The parameters of this rank that were not read but set to zero.

    Raises:
        HflowError: HF406 when files or tensors are missing, unreadable, of another shape, or of a model
            with another head.
    """
    folder = Path(model.path)
    present = _files(folder)
    if model.head == "lm" and SCALAR_HEAD in present and LM_HEAD not in present:
        problem = f"model `{model.name}` has a scalar head in its folder, and predicts no tokens"
        raise _unusable(folder, problem, "write `head: scalar`", model.span)
    fresh = {SCALAR_HEAD} - present.keys() if model.head == "scalar" and not model.frozen else set[str]()
    wanted: dict[str, list[str]] = {}
    for name in weights.names():
        if name in fresh:
            weights.write(name, weights.box(name), torch.zeros(()))
        elif name in present:
            wanted.setdefault(present[name], []).append(name)
        else:
            raise _missing(folder, name, model)
    for file, names in wanted.items():
        with _opened(folder / file) as tensors:
            _read(weights, tensors, names, folder / file, model)
    return tuple(name for name in weights.names() if name in fresh)


def _files(folder: Path) -> dict[str, str]:
    """The file that holds each tensor of the folder."""
    if (folder / SINGLE).is_file():
        with _opened(folder / SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)
    try:
        return json.loads((folder / INDEX).read_text())["weight_map"]
    except FileNotFoundError:
        raise _unusable(folder, f"there is neither {SINGLE} nor {INDEX}") from None
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(folder / INDEX, f"no index of tensors ({error})") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:  # type: ignore[no-untyped-call]
            yield tensors
    except (OSError, SafetensorError) as error:
        raise _unusable(file, str(error)) from error


def _read(weights: MegatronWeights, tensors: Any, names: list[str], file: Path, model: Model) -> None:
    present = set(tensors.keys())
    for name in names:
        if name not in present:  # an index may promise what a file does not hold
            raise _missing(file, name, model)
        part = tensors.get_slice(name)
        shape, asked = tuple(part.get_shape()), weights.full_shape(name)
        if shape != asked:
            raise _unusable(file, f"tensor `{name}` has shape {shape}, asked for is {asked}")
        weights.write(name, weights.box(name), _cut(part, weights.box(name)))


def _cut(part: Any, box: Box) -> Any:
    return part[tuple(slice(start, stop) for start, stop in box)]


def _missing(path: Path, name: str, model: Model) -> HflowError:
    head = f"a reward model's folder has the tensor `{SCALAR_HEAD}`; a language model's has none"
    problem = f"there is no tensor `{name}`, which model `{model.name}` needs"
    return _unusable(path, problem, head if name == SCALAR_HEAD else "", model.span)


def _unusable(path: Path, problem: str, help_: str = "", span: Span | None = None) -> HflowError:
    return HflowError(Diagnostic("HF406", f"`{path}`: {problem}", span, help_))
