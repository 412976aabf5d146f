"""Reading files in safetensors' format that anybody may have written.

safetensors maps a file by its name, so that it follows links, may find another file than the one that was
checked, and dies (SIGBUS) when the file is cut meanwhile. Here everything is asked of one open file, and no
more is taken into memory than it has.
"""

from __future__ import annotations

import os
import stat
import zlib
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hflow.bounded_read import UnreadableError, parse_json
from hflow.plan.layout import Box

CHUNK = 2**20  # bytes that are read at once for the checksum
MAX_HEADER_BYTES = 100_000_000  # safetensors writes no longer one
LENGTH_BYTES = 8
CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
HeaderEntry = tuple[torch.dtype, tuple[int, ...], int]  # dtype, shape, and where the values begin


class OpenedFile:
    """A regular file, reached by no link. Raises OSError, or UnreadableError for what cannot be."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        try:
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableError("kind", "it is no regular file")
            self.size = found.st_size
            self._header: tuple[dict[str, HeaderEntry], int] | None = None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def checksum(self) -> int:
        """The CRC-32 of all bytes."""
        found = 0
        for start in range(0, self.size, CHUNK):
            found = zlib.crc32(self._bytes(start, min(CHUNK, self.size - start)).numpy().data, found)
        return found

    def read(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], part: Box) -> Tensor:
        """Of the tensor `key`, which has this dtype and shape, the values in the box `part`, in its shape."""
        entries, start = self._entries()
        if key not in entries:
            raise UnreadableError("json", f"there is no tensor `{key}`")
        found_dtype, found_shape, offset = entries[key]
        if (found_dtype, found_shape) != (dtype, shape):
            raise UnreadableError("json", f"tensor `{key}` is not what the manifest says")
        rows, row_bytes = (part[0] if part else (0, 1)), prod(shape[1:]) * dtype.itemsize
        at, size = start + offset + rows[0] * row_bytes, (rows[1] - rows[0]) * row_bytes
        values = self._bytes(at, size).view(dtype).reshape([rows[1] - rows[0], *shape[1:]] if part else [])
        return values[tuple(slice(None) if i == 0 else slice(a, b) for i, (a, b) in enumerate(part))]

    def _entries(self) -> tuple[dict[str, HeaderEntry], int]:
        """Those of the header, and where the values of all begin."""
        if self._header is None:
            length = int.from_bytes(self._bytes(0, LENGTH_BYTES).numpy().tobytes(), "little")
            if length > min(MAX_HEADER_BYTES, self.size - LENGTH_BYTES):
                raise UnreadableError("large", f"its header is said to have {length:,} bytes")
            start = LENGTH_BYTES + length
            header = self._bytes(LENGTH_BYTES, length).numpy().tobytes()
            self._header = _parsed(header, self.size - start), start
        return self._header

    def _bytes(self, start: int, size: int) -> Tensor:
        if start + size > self.size:
            raise UnreadableError("large", f"it ends before byte {start + size:,}")
        values = torch.empty(size, dtype=torch.uint8)
        left, at = values.numpy().data, start
        while left:
            count = os.preadv(self._descriptor, [left], at)
            if not count:
                raise UnreadableError("large", f"it ends before byte {at + len(left):,}")
            left, at = left[count:], at + count
        return values


def _parsed(header: bytes, size: int) -> dict[str, HeaderEntry]:
    """The entries of a header before `size` bytes of values, one after the other, without gaps."""
    try:
        found = parse_json(header.decode())
    except UnicodeDecodeError as error:
        raise UnreadableError("text", f"its header is not UTF-8: {error.reason}") from None
    if not isinstance(found, dict):
        raise UnreadableError("json", "its header is no JSON object")
    entries: dict[str, HeaderEntry] = {}
    places: list[tuple[int, int]] = []
    for key, entry in cast("dict[str, Any]", found).items():
        dtype, shape, (start, end) = _entry(key, entry)
        if end - start != prod(shape) * dtype.itemsize:
            raise UnreadableError("json", f"tensor `{key}` has another size than its shape")
        entries[key] = dtype, shape, start
        places.append((start, end))
    at = 0
    for start, end in sorted(places):
        if start != at:
            raise UnreadableError("json", f"its tensors overlap or leave a gap at byte {at:,}")
        at = end
    if at != size:
        raise UnreadableError("json", f"its tensors have {at:,} bytes, and {size:,} follow the header")
    return entries


def _entry(key: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, end], **others} if (
            not others and code in _DTYPES and all(map(_is_size, (*shape, start, end))) and start <= end
        ):
            return _DTYPES[code], tuple(shape), (start, end)
        case _:
            raise UnreadableError("json", f"its entry of tensor `{key}` cannot be")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
