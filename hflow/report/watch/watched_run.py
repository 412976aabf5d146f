"""What the files in a run's folder say of it now: nothing else is asked, so any process can watch any run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import UnreadableError, read_json
from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.report.run_status import Status, read_summary, run_status
from hflow.report.watch.growing_file import GrowingFile
from hflow.runtime.controller.run_folder import NOW

MAX_NOW_BYTES = 2**16


@dataclass
class WatchedRun:
    """A run as it was at the last `look`.

    Attributes:
        folder: of the run.
        status: as `hflow runs` tells it.
        metrics: lines of metrics.jsonl.
        evaluations: the metric's title (``held-out reward.score``, ``eval/test/pass@1``), and its value by
            finished steps.
        plan: that is run; None where it cannot be read.
        began: of the present process, in seconds since 1970.
        node: that runs now on the first worker; empty where nobody knows.
        node_since: in seconds since 1970.
        looked: when this was read.
    """

    folder: Path
    status: Status = "unreadable"
    metrics: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    plan: Plan | None = None
    began: float = 0.0
    node: str = ""
    node_since: float = 0.0
    looked: float = 0.0

    def __post_init__(self) -> None:
        self._metrics_file = GrowingFile(self.folder / "metrics.jsonl")
        self._events_file = GrowingFile(self.folder / "events.jsonl")
        self._plan_mtime = 0.0

    def look(self) -> None:
        """Read what is new."""
        self.status = run_status(self.folder, read_summary(self.folder))  # first: later files are no older
        lines = list(self._metrics_file.new_lines())
        if self._metrics_file.is_anew:
            self.metrics.clear()
        self.metrics.extend(line for line in lines if _is_step(line))
        for event in self._events_file.new_lines(unless=b'"event": "ran"'):
            self._hear(event)
        self._read_plan()
        self._read_now()
        self.looked = time.time()

    def _hear(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "started" | "resumed", "time": float(began), **rest}:
                self.began = began
                self._forget(int(rest.get("step", 0)))
            case {"event": "evaluated", "step": int(step), "metric": str(metric), "value": float(value)}:
                self.evaluations.setdefault(f"held-out {metric}", {})[step] = value
            case {"event": "evaluated", "step": int(step), "metrics": dict(named)}:
                for key, value in cast(dict[str, float], named).items():
                    self.evaluations.setdefault(key, {})[step] = value
            case _:
                pass

    def _forget(self, step: int) -> None:
        """Evaluations after the step that the run goes on from."""
        for values in self.evaluations.values():
            for at in [at for at in values if at > step]:
                del values[at]

    def _read_plan(self) -> None:
        """Again where it has become another: a run that lost devices has a new one."""
        try:
            mtime = (self.folder / "plan.json").stat().st_mtime
            if mtime != self._plan_mtime:
                self._plan_mtime = mtime
                self.plan = load_plan(self.folder / "plan.json")
        except (OSError, HflowError):  # of another version of hflow: the rest is shown without it
            self.plan = None

    def _read_now(self) -> None:
        self.node = ""
        try:
            found = read_json(self.folder / NOW, MAX_NOW_BYTES)
        except UnreadableError:
            return
        match found:
            case {"node": str(node), "since": float(since)} if self.status == "running":
                self.node, self.node_since = node, since
            case _:
                pass


def _is_step(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and isinstance(line.get("time_s"), int | float)
