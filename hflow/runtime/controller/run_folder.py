"""``runs/<name>-<time>/``: everything a run leaves behind, written as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hflow.compiler.plan import Plan
from hflow.diagnostics import Diagnostic, HflowError
from hflow.view.report import Report, report_html
from hflow.view.trace import chrome_trace

TRACED_STEPS = 20  # events of the first and last steps; a long run's trace stays small enough to open


class RunFolder:
    """graph.yaml, plan.json, events.jsonl, metrics.jsonl; at the end also summary, report and trace."""

    def __init__(self, path: Path | None, plan: Plan):
        """Make the folder (by default a new one under ``runs/``). HF407 if it exists and is not empty."""
        self.plan = plan
        self.path = path or Path("runs") / f"{plan.graph.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                help_ = "give another one with --run-dir, or remove it"
                raise HflowError(Diagnostic("HF407", f"`{self.path}` exists and is not empty", help=help_))
            self._metrics_file = (self.path / "metrics.jsonl").open("a")
            self._events_file = (self.path / "events.jsonl").open("a")
        except OSError as error:
            raise HflowError(Diagnostic("HF407", f"`{self.path}` cannot be written: {error}")) from None
        plan.save(self.path / "plan.json")
        (self.path / "graph.yaml").write_text(plan.graph.text)
        self.metrics: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []

    def export(self, model: str) -> Path:
        """Where a trained model goes."""
        return self.path / "export" / model

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        self._append(self._events_file, {"time": time.time(), "event": kind, **fields})

    def step(self, metrics: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Record a finished step: its metrics and what every worker did when."""
        self.metrics.append(metrics)
        self._append(self._metrics_file, metrics)
        for event in events:
            self._append(self._events_file, {"event": "ran", **event})
        self._events += events
        recent = metrics["step"] - TRACED_STEPS // 2
        self._events = [e for e in self._events if e["step"] < TRACED_STEPS // 2 or e["step"] > recent]

    def finish(self, summary: dict[str, Any], diagnostics: Sequence[Diagnostic] = ()) -> None:
        """Write the summary and the views made of everything recorded."""
        self._metrics_file.close()
        self._events_file.close()
        _write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        _write(self.path / "trace.json", chrome_trace(self.plan, self._events))
        report = Report(self.plan, self.metrics, summary, self._events, diagnostics)
        _write(self.path / "report.html", report_html(report))

    def _append(self, file: Any, line: dict[str, Any]) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()


def _write(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(text)
    temporary.replace(path)
