"""The views of a run: its report, its trace, and the table that is printed at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.diagnostics import Diagnostic
from hflow.graph.lengths_file import seen_in
from hflow.plan.plan import Plan
from hflow.report.report import RunReport, report_html
from hflow.report.samples.page import samples_html
from hflow.report.trace import chrome_trace
from hflow.report.trackers.registry import make_trackers
from hflow.runtime.controller.run_views import RunViews
from hflow.runtime.samples.files import sample_files
from hflow.view.measured import Metrics
from hflow.view.terminal.diff import plan_diff
from hflow.view.terminal.length_text import seen_lengths
from hflow.view.terminal.terminal import labelled, measured_text

WIDTH = 100
SAMPLES = "samples.html"


def _files(
    plan: Plan,
    metrics: Sequence[Metrics],
    summary: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    diagnostics: Sequence[Diagnostic],
) -> Mapping[str, Callable[[], str]]:
    return {
        "trace.json": lambda: chrome_trace(plan, events),
        "report.html": lambda: report_html(RunReport(plan, metrics, summary, events, diagnostics)),
    }


def _changes(old: Plan, new: Plan) -> str:
    return labelled(plan_diff(old, new), WIDTH)


def _pages(folder: Path, plan: Plan) -> Mapping[str, Callable[[], str]]:
    return {SAMPLES: lambda: samples_html(folder, plan.graph.name)} if sample_files(folder) else {}


def _lengths(folder: Path, plan: Plan) -> str:
    return seen_lengths(plan.graph, seen_in(folder), WIDTH)


RUN_VIEWS = RunViews(_files, measured_text, _changes, _pages, make_trackers, _lengths)
