"""TensorBoard: event files in ``RUN/tensorboard``, for ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hflow.report.trackers.shown import in_sections, samples_text
from hflow.runtime.controller.tracking import TrackedRun
from hflow.view.terminal.terminal import plan_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorboardTracker:
    """When a run goes on, a mark in a new file (`purge_step`) makes TensorBoard forget later steps."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._run: TrackedRun | None = None

    def begin(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer:
            self._writer.close()
        folder = run.folder / FOLDER
        is_new = not folder.exists()
        self._run = run
        # of a new run, too: TensorBoard takes the first such mark for the beginning, and later ones for cuts
        self._writer = SummaryWriter(str(folder), purge_step=run.first)
        for step, values in run.values.items():
            if is_new or step >= run.first:  # an evaluation after so many steps was purged with the step
                self.values(step, values)
        self._writer.add_text("plan", _code(plan_text(run.plan)), run.first)
        self._writer.add_text("graph", _code(run.plan.graph.text), run.first)
        self._writer.flush()

    def values(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer
        for name, value in values.items():
            self._writer.add_scalar(in_sections(name), value, step)
        self._writer.flush()

    def samples(self, step: int, file: Path) -> None:
        assert self._writer and self._run
        self._writer.add_text("samples", _code(samples_text(self._run.folder, step)), step)
        self._writer.flush()

    def finish(self, status: str, files: Sequence[Path]) -> None:
        """TensorBoard shows no pages: it is told where they are."""
        if self._writer is None or self._run is None:
            return
        lines = [f"{self._run.plan.graph.name}: {status}", *(str(file.absolute()) for file in files)]
        self._writer.add_text("report", _code("\n".join(lines)), self._run.plan.graph.steps)
        self._writer.close()


def _code(text: str) -> str:
    """Markdown in which nothing of a text is obeyed: each line is one of code, whatever stands in it."""
    return "\n".join(f"    {line}" for line in text.splitlines())
