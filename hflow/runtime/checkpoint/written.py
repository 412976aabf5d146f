"""What a worker tells of the part of a checkpoint that it has written."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.plan.layout import Box
from hflow.runtime.checkpoint.manifest import StoredDType, StoredFile


@dataclass(frozen=True)
class WrittenPiece:
    """A box of tensor `name`, of `dtype` and `shape`, under `key` in the worker's file."""

    name: str
    dtype: StoredDType
    shape: tuple[int, ...]
    box: Box
    key: str


@dataclass(frozen=True)
class WrittenPart:
    """Of the checkpoint of `step`. `file`: None of a worker that had nothing to write, or could not: then
    `error` says why. `write_s`: seconds, beside the steps."""

    step: int
    name: str = ""
    file: StoredFile | None = None
    pieces: tuple[WrittenPiece, ...] = ()
    write_s: float = 0.0
    error: str = ""
