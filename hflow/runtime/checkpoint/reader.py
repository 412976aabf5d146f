"""Reading a checkpoint: any box of any tensor, whoever wrote its pieces."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hflow.plan.layout import Box, volume
from hflow.runtime.checkpoint.manifest import (
    Manifest,
    Piece,
    StoredState,
    damaged,
    pieces_in,
    read_manifest,
)
from hflow.runtime.checkpoint.tensor_file import checksum
from hflow.runtime.rows import TORCH_DTYPES


class CheckpointReader:
    """The tensors of the checkpoint in `folder`. What cannot be read raises HflowError HF412."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._files: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def verify(self, part: int, parts: int) -> None:
        """Compare the checksums of every `parts`-th file, beginning with file number `part`."""
        for name in sorted(self.manifest.files)[part::parts]:
            try:
                found = checksum(self.folder / name)
            except OSError as error:
                raise damaged(self.folder, f"`{name}`: {error.strerror}") from None
            if found != self.manifest.files[name].crc32:
                raise damaged(self.folder, f"the checksum of `{name}` is not that of what was written")

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
        inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, piece.box))
        try:
            file = self._open(piece.file)
            part = file.get_slice(piece.key)
            shape = tuple(part.get_shape())
            values: Tensor = part[inside] if inside else file.get_tensor(piece.key)
        except (OSError, SafetensorError, ValueError) as error:
            raise damaged(self.folder, f"`{piece.file}`: {error}") from None
        if shape != tuple(b - a for a, b in piece.box) or values.dtype != TORCH_DTYPES.get(state.dtype):
            raise damaged(self.folder, f"`{piece.file}`: `{piece.key}` is not what the manifest says")
        return values

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, framework="pt").__enter__()  # type: ignore
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            with suppress(SafetensorError):
                file.__exit__(None, None, None)
        self._files.clear()
