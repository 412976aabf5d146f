"""Metrics and samples go to trackers while a run goes on: each has a thread of its own, and none can end,
change or hold up the run.

What a tracker is stands here; those that exist are handed in (`RunViews.trackers`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hflow.plan.plan import Plan

END_S, INTERRUPTED_END_S = 60.0, 5.0  # that trackers have at the end of a run
EVALUATION = "eval"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run begins, goes on or goes back.

    Attributes:
        folder: of the run.
        plan: that is run.
        first: the step that comes next.
        values: of the steps before, by step.
    """

    folder: Path
    plan: Plan
    first: int = 0
    values: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])


class Tracker(Protocol):
    """Something that shows runs while they go on. All calls come from one thread; whatever is raised is told
    once, and the tracker is not used again."""

    name: str

    def begin(self, run: TrackedRun) -> None:
        """Begin, or go on with, the tracker's run of this folder: what it has of ``run.first`` and of later
        steps is forgotten, and what it lacks of those before is added. Called again where a run goes back."""
        ...

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step by name, as in metrics.jsonl; an evaluation after so many steps is
        ``eval.NODE.PORT``. Steps come in order."""
        ...

    def samples(self, step: int, file: Path) -> None:
        """The table of a step's samples (`hflow.runtime.samples.files`)."""
        ...

    def finish(self, status: str, files: Sequence[Path]) -> None:
        """The run has ended, or is interrupted, and left these files. Ends all threads and processes."""
        ...


class Tracking:
    """The trackers of a run. `say` tells the user, and is called in the thread of the run only."""

    def __init__(self, trackers: Sequence[Tracker] = (), say: Callable[[str], None] = lambda _: None):
        self._say = say
        self._feeds = [_Feed(tracker) for tracker in trackers]

    def begin(self, run: TrackedRun) -> None:
        self._put("begin", run)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._put("values", metrics["step"], numbers_of(metrics))

    def evaluated(self, event: Mapping[str, Any]) -> None:
        """An event `evaluated`."""
        self._put("values", event["step"], evaluation_of(event))

    def samples(self, step: int, file: Path) -> None:
        self._put("samples", step, file)

    def finish(self, status: str, files: Sequence[Path]) -> None:
        """Wait until trackers have taken everything, but not for ever."""
        limit_s = INTERRUPTED_END_S if status == "interrupted" else END_S
        self._put("finish", status, files)
        ends_at = time.monotonic() + limit_s
        for feed in self._feeds:
            feed.wait(max(0.0, ends_at - time.monotonic()))
        self._tell()
        for feed in self._feeds:
            if feed.is_busy:
                what = f"tracker `{feed.name}` has not ended after {limit_s:g} s"
                self._say(f"{what}; it may lack the last steps")
        self._feeds = []

    def _put(self, method: str, *arguments: Any) -> None:
        for feed in self._feeds:
            feed.put(method, *arguments)
        self._tell()

    def _tell(self) -> None:
        for feed in self._feeds:
            if problem := feed.new_problem():
                self._say(f"tracker `{feed.name}` failed, and is not used any more: {problem}")


class _Feed:
    """Calls of one tracker, made one after another in a thread. It is a daemon: a tracker that hangs does not
    keep the process alive."""

    def __init__(self, tracker: Tracker):
        self.name = tracker.name
        self._tracker = tracker
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._problem, self._is_told, self._has_failed = "", False, False
        self._thread = threading.Thread(target=self._work, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def put(self, method: str, *arguments: Any) -> None:
        if not self._has_failed:
            self._calls.put((method, arguments))

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def new_problem(self) -> str:
        """Why it failed, if nobody was told yet."""
        if self._is_told or not self._problem:
            return ""
        self._is_told = True
        return self._problem

    def _work(self) -> None:
        method = ""
        while method != "finish":
            method, arguments = self._calls.get()
            try:
                getattr(self._tracker, method)(*arguments)
            except BaseException as error:  # libraries of others may raise anything, SystemExit too
                if method == "samples" and not arguments[1].exists():
                    continue  # it made room for later ones, or its step is made again
                lines = str(error).strip().splitlines()
                self._problem = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                self._has_failed = True
                return


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a line of metrics.jsonl, without its step."""
    found = ((name, value) for name, value in metrics.items() if name != "step")
    return {n: float(v) for n, v in found if isinstance(v, int | float) and not isinstance(v, bool)}


def evaluation_of(event: Mapping[str, Any]) -> dict[str, float]:
    """What an event `evaluated` measured: of ``eval:`` as ``eval.NODE.PORT``, of named ones by key."""
    if "metric" in event:
        return {f"{EVALUATION}.{event['metric']}": float(event["value"])}
    return {key: float(value) for key, value in event["metrics"].items()}


def values_before(
    first: int, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, float]]:
    """Numbers of the steps before `first`, and of the evaluations until then, by step."""
    found: dict[int, dict[str, float]] = {}
    for event in evaluations:
        if event["step"] <= first:
            found.setdefault(event["step"], {}).update(evaluation_of(event))
    for line in metrics:
        if line["step"] < first:
            found.setdefault(line["step"], {}).update(numbers_of(line))
    return dict(sorted(found.items()))
