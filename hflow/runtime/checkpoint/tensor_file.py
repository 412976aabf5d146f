"""Writing tensors to a file in safetensors' format, piece by piece.

safetensors' own function first copies all tensors into bytes of Python, so that a checkpoint would be in the
host's memory twice. This one writes from where the values lie, computes the checksum on the way, and can be
stopped.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hflow.runtime.checkpoint.manifest import StoredFile
from hflow.runtime.checkpoint.opened_file import CODES

CHUNK = 2**24  # bytes
ALIGNMENT = 8


class WritingStopped(Exception):  # noqa: N818  (it is what happened)
    """Nobody needs the file any more."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], stopped: threading.Event) -> StoredFile:
    """Make a file of `tensors`, which lie on the host. When this returns, its bytes are on the disk.

    Raises:
        OSError: when it cannot be written, or is there already.
        WritingStopped: when `stopped` was set meanwhile.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        checksum = size = 0
        for view in (memoryview(_header(tensors)), *map(_bytes, tensors.values())):
            for start in range(0, len(view), CHUNK):
                if stopped.is_set():
                    raise WritingStopped
                chunk = view[start : start + CHUNK]
                checksum = zlib.crc32(chunk, checksum)
                size += len(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return StoredFile(size, checksum)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        entries[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
