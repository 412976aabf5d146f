"""Writes a worker's part of a checkpoint in a thread of its own, while the next steps run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hflow.plan.layout import Box
from hflow.runtime.checkpoint.tensor_file import WritingStopped, write_tensors
from hflow.runtime.checkpoint.written import WrittenPart, WrittenPiece
from hflow.runtime.worker.checkpoint import StatePart


class CheckpointWriter:
    """One part after the other; `begin` waits for the one before. `close` gives up what is under way."""

    def __init__(self, rank: int) -> None:
        self._name = f"rank-{rank:05d}.safetensors"
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._written: list[WrittenPart] = []

    def begin(self, step: int, folder: Path, parts: Sequence[StatePart]) -> None:
        """Write `parts`, which nobody changes any more, to a file in `folder`."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, folder, parts), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def collect(self) -> list[WrittenPart]:
        """What has ended since this was last asked."""
        found, self._written = self._written, []
        return found

    def close(self) -> None:
        self._stopped.set()
        self.wait()

    def _write(self, step: int, folder: Path, parts: Sequence[StatePart]) -> None:
        part = self._part(step, folder, parts)
        self._written.append(part)  # looked up now: it is another list once `collect` was called

    def _part(self, step: int, folder: Path, parts: Sequence[StatePart]) -> WrittenPart:
        if not parts:
            return WrittenPart(step)
        tensors = {_key(part): part.values for part in parts}
        began = time.perf_counter()
        try:
            file = write_tensors(folder / self._name, tensors, self._stopped)
        except OSError as error:
            return WrittenPart(step, error=f"{folder / self._name}: {error.strerror or error}")
        except WritingStopped:
            return WrittenPart(step, error="the run ended")
        except Exception as error:  # or nobody would hear of it
            return WrittenPart(step, error=f"{type(error).__name__}: {error}")
        pieces = tuple(
            WrittenPiece(part.state.name, part.state.dtype, part.shape, part.box, key)
            for part, key in zip(parts, tensors)
        )
        return WrittenPart(step, self._name, file, pieces, time.perf_counter() - began)


def _key(part: StatePart) -> str:
    """The tensor's name, with the box where that is not all of it."""
    if part.box == tuple((0, size) for size in part.shape):
        return part.state.name
    return f"{part.state.name}[{_text(part.box)}]"


def _text(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in box)
