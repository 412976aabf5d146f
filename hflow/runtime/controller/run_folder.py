"""``runs/<name>-<time>/``: everything a run leaves behind, written as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.lengths_file import FILE as LENGTHS_FILE
from hflow.graph.run_config import DEFAULT_RUN, RunConfig
from hflow.graph.run_file import FILE as RUN_FILE
from hflow.graph.run_file import run_config_text
from hflow.plan.plan import Plan, to_json
from hflow.runtime.controller.former_run import FormerRun, read_lines
from hflow.runtime.controller.line_file import LineFile
from hflow.runtime.controller.plan_history import plan_began, record_plans, resume_plans
from hflow.runtime.controller.run_views import RunViews
from hflow.runtime.controller.seen_lengths import LengthCounts
from hflow.runtime.controller.tracking import TrackedRun, Tracking, values_before
from hflow.runtime.samples.files import SampleFiles
from hflow.whole_file import unwritten, write_whole

TRACED_STEPS = 20  # events of the first and last steps; a long run's trace stays small enough to open
NOW = "now.json"
RESERVE, RESERVE_BYTES = ".reserve", 32 * 2**10  # room for the end of a run on a disk that has become full


class RunFolder:
    """graph.yaml, plan.json, run.yaml, summary.json, events.jsonl, metrics.jsonl, lengths.json; then report
    and trace.

    Once something could not be written, `problem` is the HflowError (HF407), and no more lines are appended:
    what is there stays as it is.
    """

    def __init__(
        self,
        path: Path | None,
        plan: Plan,
        config: RunConfig = DEFAULT_RUN,
        former: FormerRun | None = None,
    ):
        """Make the folder (by default a new one under ``runs/``), or go on in that of the `former` run. HF407
        if it exists and is not empty, or cannot be written."""
        self.plan = plan
        self.config = config
        self.path = path or Path("runs") / f"{plan.graph.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.problem: HflowError | None = None
        self.samples = SampleFiles(self.path, config.samples)
        self.tracking = Tracking()
        self.lengths = LengthCounts()
        self.metrics: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        if former:
            self._go_on(former)
            return
        try:
            self.path = _made(self.path, is_new=path is None)
            self.samples = SampleFiles(self.path, config.samples)
            self._events_file = LineFile(self.path / "events.jsonl")  # only one run can make it
        except FileExistsError:
            raise _taken(self.path) from None
        except OSError as error:
            raise unwritten(self.path, error, "HF407") from None
        try:
            self._begin()
        except BaseException:
            self._clear()
            raise

    def rewind(self, former: FormerRun) -> None:
        """Go on from where a checkpoint was taken, in the same process, under `plan`. HF407 as `event`."""
        for file in (self._metrics_file, self._events_file):
            file.close()
        self._go_on(former)
        self.tracking.begin(self.tracked(former.step))

    def tracked(self, first: int = 0) -> TrackedRun:
        """What trackers are told of the run that goes on with step `first`."""
        events = read_lines(self.path / "events.jsonl") if first else ()
        told = [event for event in events if event.get("event") == "evaluated"]
        return TrackedRun(self.path, self.plan, first, values_before(first, self.metrics, told))

    def _go_on(self, former: FormerRun) -> None:
        """Lines of steps that are made again are dropped; events stay, with one that says so."""
        self.path, self.lengths = former.folder, LengthCounts()
        self.samples = SampleFiles(self.path, self.config.samples)
        self.samples.cut(former.step)
        self.metrics = list(former.metrics)
        self._events = list(former.events)
        lines = "".join(json.dumps(line) + "\n" for line in former.metrics)
        write_whole(self.path / "metrics.jsonl", lines, "HF407")
        try:
            self._events_file = LineFile(self.path / "events.jsonl", goes_on=True)
            self._metrics_file = LineFile(self.path / "metrics.jsonl", goes_on=True)
            (self.path / "error.txt").unlink(missing_ok=True)
        except OSError as error:
            raise unwritten(self.path, error, "HF407") from None
        self._reserve()

    def loaded(self, step: int) -> None:
        """Workers have loaded the plan and the state after `step` steps. Until then a run that goes on keeps
        the plan, the graph and the settings that it had, and can go on with those. HF407 as `event`."""
        self._describe()
        resume_plans(self.path, self.plan, step)

    def replan(self, plan: Plan, step: int) -> None:
        """Go on with `step` under another plan, in the same process. HF407 as `event`."""
        with self._noting(raises=True):
            record_plans(self.path, self.plan, plan, step)
            write_whole(self.path / "plan.json", to_json(plan) + "\n", "HF407")
        self.plan = plan

    @property
    def metrics_of_plan(self) -> list[dict[str, Any]]:
        """Of the steps under the present plan."""
        began = plan_began(self.path)
        return [line for line in self.metrics if line["step"] >= began]

    def _begin(self) -> None:
        try:
            self._metrics_file = LineFile(self.path / "metrics.jsonl")
        except OSError as error:
            raise unwritten(self.path, error, "HF407") from None
        self._reserve()
        self._describe()

    def _reserve(self) -> None:
        """Room for what `close` writes."""
        write_whole(self.path / RESERVE, bytes(RESERVE_BYTES), "HF407")

    def _describe(self) -> None:
        """Say what is run, and how it is kept."""
        write_whole(self.path / "plan.json", to_json(self.plan) + "\n", "HF407")
        write_whole(self.path / "graph.yaml", self.plan.graph.text, "HF407")
        write_whole(self.path / RUN_FILE, run_config_text(self.config), "HF407")

    def _clear(self) -> None:
        """A folder in which no run has begun can be given again."""
        for file in self.path.iterdir():
            file.unlink()

    def export(self, model: str) -> Path:
        """Where a trained model goes."""
        return self.path / "export" / model

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl. HF407 when it cannot be written."""
        self._append(self._events_file, {"time": time.time(), "event": kind, **fields})
        if kind == "evaluated":
            self.tracking.evaluated(fields)

    def step(self, metrics: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Record a finished step: its metrics and what every worker did when. HF407 as `event`."""
        self._append(self._metrics_file, metrics)
        self.metrics.append(metrics)
        self.tracking.step(metrics)
        for event in events:
            self._append(self._events_file, {"event": "ran", **event})
        self._events += events
        recent = metrics["step"] - TRACED_STEPS // 2
        self._events = [e for e in self._events if e["step"] < TRACED_STEPS // 2 or e["step"] > recent]

    def keep_samples(self, step: int, reports: Sequence[Mapping[str, Any]]) -> None:
        """Make one file of what workers have left of a step's samples. HF407 as `event`."""
        ranks = [rank for rank, report in enumerate(reports) if report["samples"]]
        with self._noting(raises=True):
            if file := self.samples.collect(self.plan, step, ranks):
                self.tracking.samples(step, file)

    def keep_lengths(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Write the lengths that all steps until now have seen. HF407 as `event`."""
        self.lengths.add(reports)
        with self._noting(raises=True):
            if text := self.lengths.text(self.plan.graph):
                write_whole(self.path / LENGTHS_FILE, text, "HF407")

    def now(self, node: str) -> None:
        """Say for who watches the run what it does at present. A failure is of no account."""
        with suppress(HflowError):
            write_whole(self.path / NOW, json.dumps({"node": node, "since": time.time()}) + "\n", "HF407")

    def summarise(self, summary: dict[str, Any]) -> None:
        """Write summary.json. A failure is a `problem`."""
        with self._noting():
            write_whole(self.path / "summary.json", json.dumps(summary, indent=2) + "\n", "HF407")

    def draw(self, views: RunViews, summary: dict[str, Any], diagnostics: Sequence[Diagnostic]) -> None:
        """Write the views made of everything recorded. A failure is a `problem`."""
        files = views.files(self.plan, self.metrics, summary, self._events, diagnostics)
        for name, text in {**files, **views.pages(self.path, self.plan)}.items():
            with self._noting():
                write_whole(self.path / name, text(), "HF407")

    def close(self, status: str, error_text: str) -> None:
        """Write the last event, and error.txt if there is a text, into the room that was kept for them and
        for the summary. A failure is a `problem`."""
        self.samples.close()
        for name in (RESERVE, NOW):
            (self.path / name).unlink(missing_ok=True)
        with self._noting():
            self.event(status)
        for file in (self._metrics_file, self._events_file):
            with self._noting():
                file.close()
        if error_text:
            with self._noting():
                write_whole(self.path / "error.txt", error_text, "HF407")

    def _append(self, file: LineFile, line: dict[str, Any]) -> None:
        if self.problem:
            return
        try:
            file.append(line)
        except HflowError as error:
            self.problem = error
            raise

    @contextmanager
    def _noting(self, raises: bool = False) -> Iterator[None]:
        """The first failure is the one to tell: others follow from it."""
        try:
            yield
        except HflowError as error:
            self.problem = self.problem or error
            if raises:
                raise


def _made(path: Path, is_new: bool) -> Path:
    """The folder, made unless there is an empty one. A new one gets a number where its name is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    for free in chain([path], numbered if is_new else ()):
        with suppress(FileExistsError):
            free.mkdir()
            return free
    if any(path.iterdir()):
        raise _taken(path)
    return path


def _taken(path: Path) -> HflowError:
    help_ = "give another one with --run-dir, or remove it"
    return HflowError(Diagnostic("HF407", f"`{path}` exists and is not empty", help=help_))
