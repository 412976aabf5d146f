"""Weights & Biases: offline, in ``RUN/wandb``; ``WANDB_MODE=online`` sends it while the run goes on.

The project is the graph's name, or ``WANDB_PROJECT``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.report.trackers.shown import in_sections, remember, remembered, sample_rows
from hflow.runtime.controller.tracking import TrackedRun
from hflow.runtime.samples.files import sample_files

FOLDER, ROWS = "wandb", 64
MAX_PAGE_BYTES = 2**24
STEP = "step"


class WandbTracker:
    """What an offline run has left is written anew when it goes on, unless it was sent meanwhile
    (``wandb sync``): nothing can be taken back there, so later steps that are known stay."""

    name = "wandb"

    def __init__(self) -> None:
        self._logged: Any = None
        self._run: TrackedRun | None = None
        self._known = 0  # steps before are there, and cannot be taken back

    def begin(self, run: TrackedRun) -> None:
        import wandb

        if self._logged:
            self._logged.finish()
        mode = os.environ.get("WANDB_MODE", "offline")
        known = remembered(run.folder, self.name).get("id")
        identity = known or secrets.token_hex(4)
        remember(run.folder, self.name, {"id": identity})
        was_sent = not _forget(run.folder / FOLDER, identity)
        self._run = run
        self._logged = wandb.init(
            dir=str(run.folder.absolute()),
            project=os.environ.get("WANDB_PROJECT") or run.plan.graph.name,
            name=run.folder.name,
            id=identity,
            resume="allow" if known else None,
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=_config(run),
            settings=wandb.Settings(
                silent=True, quiet=True, console="off", disable_git=True, save_code=False
            ),
        )
        is_online = mode == "online"
        self._known = self._logged.step if is_online else run.first if was_sent else 0
        kept = {step: file for step, file in sample_files(run.folder).items() if step < run.first}
        for step in sorted({*run.values, *kept}):
            self.values(step, run.values.get(step, {}))
            if step in kept:
                self.samples(step, kept[step])
        for name in ("plan.json", "graph.yaml"):
            self._keep(run.folder / name)

    def values(self, step: int, values: Mapping[str, float]) -> None:
        if values and step >= self._known:
            self._logged.log({in_sections(n): value for n, value in values.items()}, step=step)

    def samples(self, step: int, file: Path) -> None:
        import wandb

        assert self._run
        if step >= self._known:
            columns, rows = sample_rows(self._run.folder, step, ROWS)
            table = wandb.Table(columns=columns, data=rows)  # pyright: ignore[reportArgumentType]
            self._logged.log({"samples": table}, step=step)

    def finish(self, status: str, files: Sequence[Path]) -> None:
        """Texts in the pages are escaped by who wrote them."""
        import wandb

        if self._logged is None:
            return
        for file in files:
            self._keep(file)
            if file.suffix == ".html" and file.stat().st_size <= MAX_PAGE_BYTES:
                self._logged.log({file.stem: wandb.Html(file.read_text(), inject=False)})
        self._logged.summary["status"] = status
        self._logged.finish(exit_code=0 if status == "finished" else 1)
        wandb.teardown()

    def _keep(self, file: Path) -> None:
        copy = Path(self._logged.dir) / file.name  # W&B warns of files that lie elsewhere
        shutil.copyfile(file, copy)
        self._logged.save(str(copy), base_path=self._logged.dir, policy="now")


def _forget(folder: Path, identity: str) -> bool:
    """Remove what was written offline of a run; whether none of it has been sent."""
    found = list(folder.glob(f"offline-run-*-{identity}")) if folder.is_dir() else []
    sent = [path for path in found if any(path.glob("*.synced"))]
    for path in found:
        if path not in sent:
            shutil.rmtree(path, ignore_errors=True)
    return not sent


def _config(run: TrackedRun) -> dict[str, Any]:
    graph, plan = run.plan.graph, run.plan
    return {
        "graph": graph.name,
        "seed": graph.seed,
        "plan": plan.hash,
        "cluster": plan.cluster.name,
        **graph.params,
    }
