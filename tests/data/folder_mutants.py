"""Random damage to a model folder: to its JSON files, to its weights, and to what there is at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.graph.mutants import mutated

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
DTYPES = (torch.float8_e4m3fn, torch.int32, torch.bool, torch.float16, torch.bfloat16, torch.float64)
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    2.0,
    2**31,
    10**9,
    2**70,
    True,
    "4",
    None,
    [],
    {},
    1e308,
    float("nan"),
)
NAMES = (
    "lm_head.weight",
    "score.weight",
    "v_head.bias",
    "model.rotary_emb.inv_freq",
    "x",
    "model.layers.9.x",
)


def damage(folder: Path, seed: int) -> None:
    """One to three random changes of one kind to a model folder with weights in two files and an index."""
    rng = random.Random(seed)
    kind: Callable[[Path, random.Random], None] = rng.choice(
        (_text, _text, _config, _config, _special_tokens, _index, _index, _tensor, _head, _bytes, _file)
    )
    for _ in range(1 if kind in (_text, _head) else rng.randint(1, 3)):  # `mutated` itself makes several
        kind(folder, rng)


def _text(folder: Path, rng: random.Random) -> None:
    file = folder / rng.choice((*TEXTS, INDEX))
    if file.is_file():
        file.write_bytes(mutated(file.read_bytes(), rng.randrange(2**32)))


def _config(folder: Path, rng: random.Random) -> None:
    """A value that is read, of another size or type."""
    _edit(
        folder / "config.json",
        lambda values: values.update({rng.choice(sorted(values)): rng.choice(NUMBERS)}),
    )


def _special_tokens(folder: Path, rng: random.Random) -> None:
    key, value = (
        rng.choice(("eos_token", "pad_token", "unk_token")),
        rng.choice(("</s>", "<eos>", "1", 3, None, {})),
    )
    _edit(folder / "tokenizer_config.json", lambda values: values.update({key: value}))


def _index(folder: Path, rng: random.Random) -> None:
    files = (
        "part-0.safetensors",
        "part-1.safetensors",
        "../x",
        "/dev/zero",
        "part-0\0",
        "",
        ".",
        3,
        None,
        [],
    )

    def change(values: dict[str, Any]) -> None:
        weight_map = values["weight_map"]
        name, other = rng.choice(sorted(weight_map)), rng.choice(NAMES)
        match rng.randrange(3):
            case 0:
                weight_map[name] = rng.choice(files)
            case 1:
                weight_map[other] = weight_map[name]
            case _:
                del weight_map[name]

    _edit(folder / INDEX, change)


def _tensor(folder: Path, rng: random.Random) -> None:
    """A tensor of another type or shape, without its name, or beside the others."""
    file = folder / rng.choice(("part-0.safetensors", "part-1.safetensors"))
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    match rng.randrange(5):
        case 0:
            tensors[name] = tensors[name].to(rng.choice(DTYPES))
        case 1:
            tensors[name] = tensors[name].flatten()[: rng.choice((0, 1, 8))].clone()
        case 2:
            tensors[rng.choice(NAMES)] = torch.zeros(rng.choice(((), (1, 16), (32, 16))))
        case 3:
            tensors[rng.choice(NAMES)] = tensors.pop(name)
        case _:
            if len(tensors) > 1:
                del tensors[name]
    save_file(tensors, file)


def _head(folder: Path, rng: random.Random) -> None:
    """The JSON before the numbers of a file, or its length."""
    file = folder / rng.choice(("part-0.safetensors", "part-1.safetensors"))
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    if not 0 < length < len(content):
        return
    head = mutated(content[8 : 8 + length], rng.randrange(2**32))
    length = rng.choice((len(head), len(head), len(head), 0, 10**10, 2**64 - 1))
    file.write_bytes(struct.pack("<Q", length) + head + content[8 + length :])


def _bytes(folder: Path, rng: random.Random) -> None:
    """Bytes of any file, more of them, or fewer."""
    file = rng.choice(sorted(f for f in folder.iterdir() if f.is_file()))
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    match rng.randrange(3):
        case 0:
            file.write_bytes(content[:at])
        case 1:
            file.write_bytes(content[:at] + rng.randbytes(rng.choice((1, 4, 64))) + content[at + 1 :])
        case _:
            file.write_bytes(content + rng.randbytes(9))


def _file(folder: Path, rng: random.Random) -> None:
    """Something else in the place of a file."""
    file = rng.choice(sorted(folder.iterdir()))
    if file.is_dir():
        return
    file.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to("/dev/zero")
        case 2:
            file.mkdir()
        case 3:
            file.write_bytes(b"[" * 100_000)
        case 4:
            with file.open("wb") as sparse:
                sparse.truncate(2**33)
        case _:
            pass


def _edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    if file.is_file():
        try:
            values = json.loads(file.read_text())
            change(values)
        except (ValueError, LookupError, TypeError, AttributeError):  # damaged before
            return
        file.write_text(json.dumps(values, indent=1))


def in_two_files(folder: Path) -> None:
    """Put the weights of a folder into two files and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"part-{int('layers.1' in name)}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}, indent=1))


def copied(origin: Path, folder: Path) -> Path:
    """A fresh copy of a folder in the place of `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(origin, folder)
