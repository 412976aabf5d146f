"""Reading a file of JSON lines while another process writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, parse_json

MAX_READ_BYTES = 2**26  # at once; what is left comes with the next look


class GrowingFile:
    """Gives each whole line once. A file that was replaced or cut, as by a run that goes on, begins anew."""

    def __init__(self, path: Path):
        self.path = path
        self.is_anew = False  # whether lines given before the last look no longer count
        self._inode, self._read, self._rest = -1, 0, b""

    def new_lines(self, unless: bytes = b"") -> Iterator[dict[str, Any]]:
        """The objects in lines that are new; a part of a line, and what is no object, is none.

        Args:
            unless: lines with this in them are passed over.
        """
        for line in self._new_bytes().split(b"\n")[:-1]:
            if unless and unless in line:
                continue
            with suppress(UnreadableError, UnicodeDecodeError):
                found = parse_json(line.decode())
                if isinstance(found, dict):
                    yield found

    def _new_bytes(self) -> bytes:
        """Up to the end of the last whole line."""
        self.is_anew = False
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._read:
                    self.is_anew = self._inode >= 0
                    self._inode, self._read, self._rest = state.st_ino, 0, b""
                file.seek(self._read)
                found = file.read(MAX_READ_BYTES)
        except OSError:
            return b""
        self._read += len(found)
        whole, newline, rest = (self._rest + found).rpartition(b"\n")
        self._rest = rest
        return whole + newline
