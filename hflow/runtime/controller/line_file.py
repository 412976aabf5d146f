"""A file of JSON lines that others may read while it grows."""

from __future__ import annotations

import json
import os
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any

from hflow.whole_file import unwritten

CHUNK = 2**16


class LineFile:
    """Every line is in it whole or not at all."""

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        """Make the file, which must not be there (FileExistsError); or, if it `goes_on`, go on after its last
        whole line."""
        self.path = path
        # a buffer would be written once more when it is closed
        self._file = path.open("r+b" if goes_on else "xb", buffering=0)
        self._size = _whole_lines(self._file) if goes_on else 0
        os.ftruncate(self._file.fileno(), self._size)
        self._file.seek(self._size)

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


def _whole_lines(file: FileIO) -> int:
    """How many bytes they have: a process that was killed may have left a part of one."""
    end = file.seek(0, SEEK_END)
    while end:
        start = max(0, end - CHUNK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
