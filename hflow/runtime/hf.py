"""Writing a model as a Hugging Face folder that transformers (and hflow) can load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hflow.diagnostics import Diagnostic, HflowError

SHARD_BYTES = 4 * 2**30
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def write_hf(folder: Path | str, source: Path | str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors` beside the configuration and tokenizer files of `source`.

    The folder appears complete or not at all; one that is there already is replaced. Tensors are taken
    one after the other and written in files of at most 4 GiB (a larger tensor has a file of its own).

    Args:
        folder: where the model goes.
        source: the folder of the model that the weights were trained from.
        tensors: HF parameter names and values.

    Raises:
        HflowError: HF406 when a file cannot be read or written.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            new = Path(work) / "new"
            new.mkdir()
            _copy_companions(Path(source), new)
            dtype = _write_shards(new, tensors)
            _set_dtype(new / "config.json", dtype)
            if folder.exists():
                folder.rename(Path(work) / "old")
            new.rename(folder)
    except OSError as error:
        problem = f"model folder `{folder}` cannot be written: {error}"
        raise HflowError(Diagnostic("HF406", problem)) from error


def _copy_companions(source: Path, target: Path) -> None:
    """Everything but weights: config.json, tokenizer, generation settings, chat template."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, target / file.name)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write the files and, for more than one, the index; the name of the first tensor's dtype."""
    parts: list[list[str]] = []
    dtype, total = "", 0
    for shard in _shards(tensors):
        dtype = dtype or str(next(iter(shard.values())).dtype).removeprefix("torch.")
        total += sum(map(_size, shard.values()))
        save_file(shard, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(shard))
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + _size(tensor) > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += _size(tensor)
    yield shard


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _set_dtype(config_file: Path, dtype: str) -> None:
    """transformers loads weights in the dtype that config.json names; let it be the one they have."""
    config: dict[str, Any] = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n")
