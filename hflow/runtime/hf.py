"""Writing a model as a Hugging Face folder that transformers (and hflow) can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hflow.plan.digests import MORE_TEMPLATES
from hflow.plan.families.family import Family
from hflow.plan.families.registry import FAMILIES, shape_of
from hflow.plan.model_config import CONFIG, read_config
from hflow.plan.origin import GRAPH_FILE, PLAN_FILE
from hflow.plan.parameters import SCALAR_HEAD
from hflow.runtime.adapter_export import AdapterExport
from hflow.runtime.file_parts import joined
from hflow.runtime.model_folder import read_object
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.whole_folder import whole_folder

SHARD_BYTES = 4 * 2**30
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def write_hf(
    folder: Path | str,
    source: Path | str,
    tensors: Iterable[tuple[str, Tensor]],
    adapter: AdapterExport | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` beside the configuration and tokenizer files of `source`.

    Tensors that end in a scalar head make a model for transformers' ``AutoModelForSequenceClassification``,
    whatever head the source has. That reads the score of a row at its last token that is not padding; hflow
    reads it at the row's end token. Where the two are one token, ``config.json`` gets no ``pad_token_id``:
    transformers then takes rows one at a time, and reads the last token.

    The folder appears complete or not at all; one that is there already is replaced. Tensors are taken
    one after the other and written in files of at most 4 GiB (a larger tensor has a file of its own).

    Args:
        folder: where the model goes.
        source: the folder of the model that the weights were trained from.
        tensors: names and values of parameters, joined here to the tensors that files of the family have.
        adapter: merges the adapter's among the tensors into the others, and writes them by themselves, too.
        more: further files, their texts by name, in place of those of `source`: what the model was made from
            (`hflow.plan.origin`), and its chat template.

    Raises:
        HflowError: HF406 when a file cannot be read or written.
    """
    folder = Path(folder)
    with whole_folder(folder) as new:
        _copy_companions(Path(source), new)
        shape = shape_of(read_config(new / CONFIG))
        merged = adapter.merging(tensors) if adapter else tensors
        written = _write_shards(new, joined(shape, merged))
        _describe(new / CONFIG, FAMILIES[shape.family], written)
        if adapter:
            adapter.write(new)
        for name, text in (more or {}).items():
            (new / name).write_text(text, encoding="utf-8")


def _copy_companions(source: Path, target: Path) -> None:
    """Everything but weights, and what those were made from: configuration, tokenizer, chat template."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((*WEIGHT_SUFFIXES, GRAPH_FILE, PLAN_FILE)):
            shutil.copyfile(file, target / file.name)
    for template in sorted((source / MORE_TEMPLATES).glob("*.jinja")):
        (target / MORE_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, target / MORE_TEMPLATES / template.name)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Write the files and, for more than one, the index; the name of every tensor's dtype."""
    parts: list[list[str]] = []
    dtypes: dict[str, str] = {}
    total = 0
    for shard in _shards(tensors):
        dtypes |= {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in shard.items()}
        total += sum(map(_size, shard.values()))
        save_file(shard, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        as_any_new_file(folder / f"part-{len(parts)}")
        parts.append(list(shard))
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtypes
    weight_map: dict[str, str] = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def as_any_new_file(file: Path) -> None:
    """Give a file that safetensors has written, which only its owner may read, the mode of any new file: only
    making one tells the mode without changing it for other threads."""
    other = file.with_name(f".{file.name}.mode")
    other.touch(exist_ok=False)
    file.chmod(other.stat().st_mode)
    other.unlink()


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


def _pads_with_end(folder: Path, config: Mapping[str, Any]) -> bool:
    """As transformers counts them, a negative token is one from the end of the vocabulary."""
    padding = config["pad_token_id"] % config["vocab_size"]
    return padding == load_tokenizer(folder).eos_id


def _describe(config_file: Path, family: Family, dtypes: dict[str, str]) -> None:
    """Let config.json say what was written: the head, and the dtype, in which transformers loads weights;
    they have no other format, whatever the source's had."""
    config = read_object(config_file)
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    config["dtype"] = next(iter(dtypes.values()))
    if SCALAR_HEAD in dtypes:
        config["architectures"] = [family.class_of("scalar")]
        config["num_labels"] = 1
        for labels in ("id2label", "label2id"):
            config.pop(labels, None)
        if config.get("pad_token_id") is not None and _pads_with_end(config_file.parent, config):
            config["pad_token_id"] = None
    config_file.write_text(json.dumps(config, indent=2) + "\n")
