"""What users' functions write, line by line, until somebody takes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

MOST, CHARACTERS = 200, 2000  # lines that are kept until they are taken, and what is kept of one


@dataclass
class WrittenLines:
    """Threads add lines, another one takes them; `node` is the one whose function runs now. Of more lines
    than `MOST` between two takes the first are kept, and the others counted."""

    node: str = ""
    _lines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _left_out: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, line: bytes) -> None:
        with self._lock:
            if len(self._lines) < MOST:
                self._lines.append((self.node, line.decode(errors="replace").rstrip()[:CHARACTERS]))
            else:
                self._left_out += 1

    def take(self) -> tuple[list[tuple[str, str]], int]:
        """Pairs of a node and a line, and how many lines there were besides."""
        with self._lock:
            taken = self._lines, self._left_out
            self._lines, self._left_out = [], 0
        return taken
