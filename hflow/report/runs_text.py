"""What `hflow runs` prints: for people, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from hflow import units
from hflow.report.runs import ListedRun
from hflow.view.terminal.table import Column, table

COLUMNS: tuple[Column, ...] = (
    ("run", "left"),
    ("status", "left"),
    ("steps", "right"),
    ("best", "right"),
    ("of", "left"),
    ("checkpoints", "right"),
    ("size", "right"),
    ("age", "right"),
)
DAY_S = 86_400


def runs_text(runs: Sequence[ListedRun], now: float) -> str:
    """A line for every run, whose name is whole: it is what people type. `now` is in seconds since 1970."""
    return table(COLUMNS, [_row(run, now) for run in runs], sys.maxsize)


def runs_json(runs: Sequence[ListedRun]) -> str:
    return json.dumps([_entry(run) for run in runs])


def _row(run: ListedRun, now: float) -> tuple[str, ...]:
    planned = "?" if run.planned_steps is None else str(run.planned_steps)
    kept = f"{len(run.checkpoints)}, step {run.checkpoints[-1]}" if run.checkpoints else "-"
    best = "-" if run.best is None else f"{run.best:.4g}"
    size, age = units.size(run.size_bytes), _age(now - run.began)
    return units.printable(run.name), run.status, f"{run.steps}/{planned}", best, run.best_of, kept, size, age


def _age(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        return units.plural(int(seconds // DAY_S), "day")
    return units.duration(max(1.0, seconds))


def _entry(run: ListedRun) -> dict[str, Any]:
    """`printable` names: JSON has no other for a name that is not Unicode."""
    return {
        "name": units.printable(run.name),
        "path": units.printable(str(run.path)),
        "status": run.status,
        "steps": run.steps,
        "planned_steps": run.planned_steps,
        "best": run.best,
        "best_of": run.best_of or None,
        "size_bytes": run.size_bytes,
        "began": run.began,
        "checkpoints": list(run.checkpoints),
    }
