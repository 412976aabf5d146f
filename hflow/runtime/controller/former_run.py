"""What a run has left in its folder, for the run that goes on with it."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hflow.bounded_read import UnreadableError, read_json
from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.checkpoint.manifest import read_manifest
from hflow.runtime.controller.checkpoints import newest_usable

SUMMARY, SUMMARY_BYTES = "summary.json", 2**24
CLOCK_STEP_S = 60.0  # by which a clock may be set, or that of a file server be wrong


@dataclass(frozen=True)
class FormerRun:
    """A run up to the checkpoint that it goes on from, or up to its beginning where it has none.

    Attributes:
        folder: of the run.
        checkpoint: the checkpoint's folder.
        step: after how many steps it was taken.
        metrics: the lines of metrics.jsonl until then.
        evaluations: the metric of `eval` by finished steps.
        evaluated: the metrics of the named evaluations, each by finished steps.
        events: what every worker did when, until then.
        wall_s: that the run has taken, the steps after the checkpoint included.
    """

    folder: Path
    checkpoint: Path | None
    step: int
    metrics: tuple[dict[str, Any], ...]
    evaluations: dict[int, float]
    evaluated: dict[str, dict[int, float]]
    events: tuple[dict[str, Any], ...]
    wall_s: float


def former_run(folder: Path, tell: Callable[[HflowError], None], before: float = math.inf) -> FormerRun:
    """What is in `folder` of use; `tell` hears of checkpoints that cannot be used.

    Args:
        before: those of this step and later ones are not looked at.

    Raises:
        HflowError: HF407 when there is no run, it is still running, or it has finished and left no
            checkpoint; HF412 when there are checkpoints and none can be used.
    """
    if not (folder / "events.jsonl").is_file() or not (folder / "plan.json").is_file():
        help_ = "`hflow runs` lists runs"
        raise HflowError(Diagnostic("HF407", f"there is no run in `{folder}`", help=help_))
    summary = _summary(folder)
    if _is_running(folder, summary):
        message = f"the run in `{folder}` is still running (process {summary['pid']})"
        raise HflowError(Diagnostic("HF407", message))
    checkpoint = newest_usable(folder, tell, before)
    if checkpoint is None and summary.get("status") == "finished":
        raise HflowError(_finished(folder))
    step = read_manifest(checkpoint).step if checkpoint else 0
    metrics = {line["step"]: line for line in read_lines(folder / "metrics.jsonl") if line["step"] < step}
    events = list(read_lines(folder / "events.jsonl"))
    evaluated = {at: value for at, value in evaluations_of(events).items() if at <= step}
    named = {
        key: {at: value for at, value in by_step.items() if at <= step}
        for key, by_step in named_evaluations_of(events).items()
    }
    ran = {json.dumps(e): e for e in events if e.get("event") == "ran" and e["step"] < step}
    return FormerRun(
        folder,
        checkpoint,
        step,
        tuple(metrics[number] for number in sorted(metrics)),
        evaluated if checkpoint else {},
        {key: by_step for key, by_step in named.items() if by_step} if checkpoint else {},
        tuple(ran.values()),
        float(summary.get("wall_s") or 0.0),
    )


def _finished(folder: Path) -> Diagnostic:
    """From the beginning it would train again what it has trained, and write over its models."""
    message = f"the run in `{folder}` has finished, and left no checkpoint to go on from"
    models = sorted(path for path in (folder / "export").glob("*") if path.is_dir())
    begin = (
        [f"a new run can begin with what it trained, as `--set params.model={models[0]}`"] if models else []
    )
    keep = "`run: {checkpoint: {every: N}}` is for those that are to go on"
    return Diagnostic("HF407", message, help="; ".join([*begin, keep]))


def _summary(folder: Path) -> dict[str, Any]:
    with suppress(UnreadableError):
        found = read_json(folder / SUMMARY, SUMMARY_BYTES)
        return found if isinstance(found, dict) else {}
    return {}


def _is_running(folder: Path, summary: dict[str, Any]) -> bool:
    """As far as can be told here. A process that began after the summary was written only has its number: in
    containers, which keep their name and count from 1, that is no rare thing."""
    if summary.get("status") != "running" or summary.get("host") != socket.gethostname():
        return False
    pid = summary.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    with suppress(psutil.Error, OSError):
        process, written = psutil.Process(pid), (folder / SUMMARY).stat().st_mtime
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= written + CLOCK_STEP_S
    return False


def evaluations_of(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """The metric of `eval` by finished steps."""
    return {e["step"]: e["value"] for e in events if e.get("event") == "evaluated" and "value" in e}


def named_evaluations_of(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The metrics of the named evaluations, by key and finished steps."""
    found: dict[str, dict[int, float]] = {}
    for event in (e for e in events if e.get("event") == "evaluated"):
        for key, value in event.get("metrics", {}).items():
            found.setdefault(key, {})[event["step"]] = value
    return found


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; a last line that was cut off is none."""
    with suppress(FileNotFoundError), file.open() as lines:
        for line in lines:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
