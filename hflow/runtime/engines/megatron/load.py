"""From a Hugging Face folder into a model: each rank reads only the parts that it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hflow.compiler.layout import Box
from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.engines.megatron.weights import MegatronWeights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_safetensors(weights: MegatronWeights, folder: Path | str) -> None:
    """Set all weights from ``model.safetensors``, or the files named by its index, in `folder`.

    Raises:
        HflowError: HF406 when files or tensors are missing, unreadable or of another shape.
    """
    folder = Path(folder)
    wanted: dict[str, list[str]] = {}
    for name, file in _files(folder, weights.names()):
        wanted.setdefault(file, []).append(name)
    for file, names in wanted.items():
        try:
            with safe_open(folder / file, framework="pt") as tensors:  # type: ignore[no-untyped-call]
                _read(weights, tensors, names, folder / file)
        except (OSError, SafetensorError) as error:
            raise _unusable(folder / file, str(error)) from error


def _files(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The file that holds each of `names`."""
    if (folder / SINGLE).is_file():
        yield from ((name, SINGLE) for name in names)
        return
    try:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
    except FileNotFoundError:
        raise _unusable(folder, f"there is neither {SINGLE} nor {INDEX}") from None
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(folder / INDEX, f"no index of tensors ({error})") from error
    for name in names:
        if name not in index:
            raise _unusable(folder / INDEX, f"there is no tensor `{name}`")
        yield name, index[name]


def _read(weights: MegatronWeights, tensors: Any, names: list[str], file: Path) -> None:
    present = set(tensors.keys())
    for name in names:
        if name not in present:
            raise _unusable(file, f"there is no tensor `{name}`")
        part = tensors.get_slice(name)
        box = weights.box(name)
        shape = tuple(part.get_shape())
        if len(shape) != len(box) or any(stop > size for (_, stop), size in zip(box, shape)):
            raise _unusable(file, f"tensor `{name}` has shape {shape}, config.json asks for another")
        weights.write(name, box, _cut(part, box))


def _cut(part: Any, box: Box) -> Any:
    return part[tuple(slice(start, stop) for start, stop in box)]


def _unusable(path: Path, problem: str) -> HflowError:
    return HflowError(Diagnostic("HF406", f"`{path}`: {problem}"))
