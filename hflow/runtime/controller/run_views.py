"""What is made of a run for people. The runtime records and draws nothing: views are handed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.plan import Plan
from hflow.runtime.controller.tracking import Tracker

Record = Mapping[str, Any]  # a line of metrics.jsonl, or an event
Text = Callable[[], str]


def _no_files(
    plan: Plan,
    metrics: Sequence[Record],
    summary: Record,
    events: Sequence[Record],
    diagnostics: Sequence[Diagnostic],
) -> Mapping[str, Text]:
    return {}


def _no_trackers(names: Sequence[str]) -> Sequence[Tracker]:
    if names:
        raise HflowError(Diagnostic("HF404", f"nobody has handed in the tracker `{names[0]}`"))
    return ()


def _no_pages(folder: Path, plan: Plan) -> Mapping[str, Text]:
    return {}


def _no_changes(old: Plan, new: Plan) -> str:
    return ""


def _no_table(plan: Plan, metrics: Sequence[Record]) -> str:
    return ""


def _no_lengths(folder: Path, plan: Plan) -> str:
    return ""


@dataclass(frozen=True)
class RunViews:
    """`files`: of the run folder, by name, from everything recorded; `pages`: the same of what lies in the
    folder; `table`: what is printed at the end; `changes`: what differs between the plans before and after
    devices were lost; `trackers`: those of these names (HF404 where one is not installed);
    `lengths`: those of the texts in the folder, printed after `table`."""

    files: Callable[
        [Plan, Sequence[Record], Record, Sequence[Record], Sequence[Diagnostic]], Mapping[str, Text]
    ] = _no_files
    table: Callable[[Plan, Sequence[Record]], str] = _no_table
    changes: Callable[[Plan, Plan], str] = _no_changes
    pages: Callable[[Path, Plan], Mapping[str, Text]] = _no_pages
    trackers: Callable[[Sequence[str]], Sequence[Tracker]] = _no_trackers
    lengths: Callable[[Path, Plan], str] = _no_lengths


NO_VIEWS = RunViews()
