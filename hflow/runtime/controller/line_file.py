"""A file of JSON lines that others may read while it grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hflow.whole_file import unwritten


class LineFile:
    """Every line is in it whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Make the file, which must not be there (FileExistsError)."""
        self.path = path
        self._file = path.open("xb", buffering=0)  # a buffer would be written once more when it is closed
        self._size = 0

    def append(self, line: dict[str, Any]) -> None:
        """Raises HflowError HF407 when the line cannot be written; then the file ends where it ended."""
        data = json.dumps(line).encode() + b"\n"
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            os.lseek(self._file.fileno(), self._size, os.SEEK_SET)
            raise unwritten(self.path, error, "HF407") from None
        self._size += len(data)

    def close(self) -> None:
        """Raises HflowError HF407: some file systems only notice here that they are full."""
        try:
            self._file.close()
        except OSError as error:
            raise unwritten(self.path, error, "HF407") from None
