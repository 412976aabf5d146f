"""``workers.log`` in a run's folder: what users' functions wrote, with step, node and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hflow.runtime.controller.worker_failure import WorkerReport
from hflow.units import printable

SHOWN = 5  # lines of a step that a terminal shows


class WorkersLog:
    """`say` shows a line to whoever watches. A disk that takes no more of it ends no run."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / "workers.log", say

    def add(self, step: int, reports: Sequence[WorkerReport]) -> None:
        """What the workers' reports of a step, or of an evaluation after so many, have of it."""
        lines = list(_lines(reports))
        if not lines:
            return
        with suppress(OSError), self._path.open("a") as file:
            file.writelines(f"step {step + 1}  {line}\n" for line in lines)
        for line in lines[:SHOWN]:
            self._say(line)
        if len(lines) > SHOWN:
            self._say(f"… {len(lines) - SHOWN} more in {self._path}")


def _lines(reports: Sequence[WorkerReport]) -> Iterator[str]:
    for report in reports:
        output = report.get("output", {"lines": (), "left_out": 0, "rank": 0})
        for node, text in output["lines"]:
            yield f"{node or 'import'} on rank {output['rank']}: {printable(text)}"
        if output["left_out"]:
            yield f"rank {output['rank']}: {output['left_out']} more lines, which were not kept"
