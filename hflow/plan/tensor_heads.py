"""The head of a safetensors file: names, dtypes and shapes of its tensors, read without a library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import UnreadableError, parse_json
from hflow.plan.digests import HEADER_BYTES

METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorHead:
    """`dtype`: as safetensors calls it: ``F32``, ``BF16``."""

    dtype: str
    shape: tuple[int, ...]


def read_heads(file: Path) -> dict[str, TensorHead]:
    """Of all tensors of `file`, by name.

    Raises:
        UnreadableError: it is missing, or no safetensors file.
    """
    found = parse_json(_head_text(file))
    if not isinstance(found, dict):
        raise UnreadableError("json", "it is no safetensors file")
    entries = cast("dict[str, Any]", found)
    return {name: _tensor_head(name, entry) for name, entry in entries.items() if name != METADATA}


def _head_text(file: Path) -> str:
    if file.exists() and not file.is_file():  # a pipe has no end
        raise UnreadableError("kind", "it is no regular file")
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(HEADER_BYTES, os.fstat(opened.fileno()).st_size):
                raise UnreadableError("json", "it is no safetensors file")
            return opened.read(length).decode()
    except FileNotFoundError:
        raise UnreadableError("missing", "no such file") from None
    except OSError as error:
        raise UnreadableError("os", error.strerror or "it cannot be opened") from None
    except UnicodeDecodeError:
        raise UnreadableError("text", "it is no safetensors file") from None


def _tensor_head(name: str, entry: Any) -> TensorHead:
    found = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape = found.get("dtype"), found.get("shape")
    sizes: list[Any] = cast("list[Any]", shape) if isinstance(shape, list) else [None]
    if not isinstance(dtype, str) or not all(isinstance(size, int) for size in sizes):
        raise UnreadableError("json", f"it says no dtype and shape of tensor `{name}`")
    return TensorHead(dtype, tuple(sizes))
