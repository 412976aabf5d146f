"""Reading a checkpoint: any box of any tensor, whoever wrote its pieces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from hflow.bounded_read import UnreadableError
from hflow.diagnostics import HflowError
from hflow.plan.layout import Box, volume
from hflow.plan.run_state import StateTensor
from hflow.runtime.checkpoint.manifest import (
    Manifest,
    Piece,
    StoredState,
    damaged,
    pieces_in,
    read_manifest,
)
from hflow.runtime.checkpoint.opened_file import OpenedFile
from hflow.runtime.rows import TORCH_DTYPES


class CheckpointReader:
    """The tensors of the checkpoint in `folder`. What cannot be read raises HflowError HF412."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._files: dict[str, OpenedFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def verify(self, part: int, parts: int) -> None:
        """Compare the checksums of every `parts`-th file, beginning with file number `part`."""
        for name in sorted(self.manifest.files)[part::parts]:
            try:
                found = self._open(name).checksum()
            except (OSError, UnreadableError) as error:
                raise self._unreadable(name, error) from None
            if found != self.manifest.files[name].crc32:
                raise damaged(self.folder, f"the checksum of `{name}` is not that of what was written")

    def expect(self, states: Iterable[StateTensor]) -> None:
        """Compare dtypes and shapes with those of the run's state, of all tensors that are there: another
        model's may hold the box that is read, and something else in it."""
        for state in (s for s in states if s.name in self.manifest.tensors):
            found = self.manifest.tensors[state.name]
            sizes = zip(found.shape, state.shape)
            fits = len(found.shape) == len(state.shape) and all(want in (None, size) for size, want in sizes)
            if found.dtype != state.dtype or not fits:
                problem = f"tensor `{state.name}` is {found.dtype} {list(found.shape)}"
                raise damaged(self.folder, f"{problem}, and the run has {state.dtype} {list(state.shape)}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._state(name).shape

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.read(name, tuple((0, size) for size in self.shape(name)))

    def read(self, name: str, box: Box) -> Tensor:
        """The values in `box` (global indices), in its shape."""
        state = self._state(name)
        found = list(pieces_in(state, box))
        if len(found) == 1:
            return self._piece(*found[0], state)
        out = torch.empty([stop - start for start, stop in box], dtype=TORCH_DTYPES[state.dtype])
        for piece, common in found:
            place = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box))
            out[place] = self._piece(piece, common, state)
        if sum(volume(common) for _, common in found) != volume(box):
            raise damaged(self.folder, f"it has not all of {box} of tensor `{name}`")
        return out

    def _state(self, name: str) -> StoredState:
        if name not in self.manifest.tensors:
            raise damaged(self.folder, f"it has no tensor `{name}`")
        return self.manifest.tensors[name]

    def _piece(self, piece: Piece, box: Box, state: StoredState) -> Tensor:
        """`box` (global indices) of what a piece holds."""
        inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(box, piece.box))
        shape = tuple(b - a for a, b in piece.box)
        try:
            return self._open(piece.file).read(piece.key, TORCH_DTYPES[state.dtype], shape, inside)
        except (OSError, UnreadableError) as error:
            raise self._unreadable(piece.file, error) from None

    def _open(self, name: str) -> OpenedFile:
        if name not in self._files:
            self._files[name] = OpenedFile(self.folder / name)
            if self._files[name].size != self.manifest.files[name].size_bytes:
                raise UnreadableError("large", "its size has changed")
        return self._files[name]

    def _unreadable(self, name: str, error: OSError | UnreadableError) -> HflowError:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        return damaged(self.folder, f"`{name}`: {problem}")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
