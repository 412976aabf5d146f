"""Checkpoints of a few tensors, whole ones and others."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.checkpoint.manifest import NAME, Manifest, Piece, StoredState, name_of, sealed, to_json
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.checkpoint.tensor_file import write_tensors

STEP = 3
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


def values() -> dict[str, Tensor]:
    """Of every dtype; a matrix, a number, and nothing at all."""
    rng = torch.Generator().manual_seed(1)
    return {
        "models/actor/weights/a": torch.randn(6, 4, generator=rng),
        "models/actor/lagging/a": torch.randn(5, 3, generator=rng).bfloat16(),
        "models/actor/updates": torch.tensor(7),
        "carried/sum.total": torch.tensor([1.5, -2.0]),
        "regions/sampling/waiting/text/values": torch.tensor([49, 43, 50], dtype=torch.uint8),
        "regions/sampling/waiting/ids/values": torch.tensor([], dtype=torch.int32),
        "regions/sampling/waiting/keep/values": torch.tensor([True, False, True]),
    }


def write(parent: Path, step: int = STEP) -> Path:
    """The matrix lies in four pieces in two files, all else in the first."""
    folder = parent / name_of(step)
    folder.mkdir(parents=True)
    files: tuple[dict[str, Tensor], ...] = ({}, {})
    states: dict[str, StoredState] = {}
    for name, tensor in values().items():
        boxes = [tuple((0, size) for size in tensor.shape)]
        if tensor.ndim == 2 and tensor.dtype == torch.float32:
            boxes = [((a, a + 3), (b, b + 2)) for a in (0, 3) for b in (0, 2)]
        pieces = [Piece(FILES[i % 2], f"{name}{i or ''}", box) for i, box in enumerate(boxes)]
        for piece in pieces:
            part = tensor[tuple(slice(*span) for span in piece.box)]
            files[FILES.index(piece.file)][piece.key] = part
        states[name] = StoredState(_CODES[tensor.dtype], tuple(tensor.shape), tuple(pieces))
    stored = {f: write_tensors(folder / f, t, threading.Event()) for f, t in zip(FILES, files)}
    manifest = Manifest(1, "0", 0.0, step, "g", "h", "p", stored, states)
    (folder / NAME).write_text(to_json(manifest))
    return folder


_CODES: dict[torch.dtype, Any] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "str",
}


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read as workers read them."""
    with closing(CheckpointReader(folder)) as reader:
        reader.verify(0, 1)
        return {name: reader.whole(name) for name in reader.manifest.tensors}


def tree_of(folder: Path) -> dict[str, Any]:
    """What a manifest says, to be changed."""
    tree = json.loads((folder / NAME).read_text())
    del tree["crc32"]
    return tree


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and values of a safetensors file."""
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def joined(header: Mapping[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def say_so(folder: Path, file: str = FILES[0]) -> None:
    """Let the manifest have the size and the checksum of a file that was changed."""
    content, tree = (folder / file).read_bytes(), tree_of(folder)
    tree["files"][file] = {"size_bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / NAME).write_text(sealed(json.dumps(tree)))
