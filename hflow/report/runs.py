"""The runs in a folder, as far as their files can be read: damaged ones are listed too."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hflow.bounded_read import UnreadableError, read_bytes
from hflow.report.best_score import best_score
from hflow.report.run_status import Status, read_summary, run_status

MARKS = ("events.jsonl", "plan.json")  # a folder with these files is that of a run
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
MAX_READ_BYTES = 2**26  # of a plan, or of metrics
_STEP = re.compile(r"step-(\d{1,18})")


@dataclass(frozen=True)
class ListedRun:
    """A run as `hflow runs` tells of it.

    `best` is the best value of `best_of` (`best_score`). `began` is in seconds since 1970. `checkpoints` are
    the steps of whole ones, ascending.
    """

    path: Path
    status: Status
    steps: int
    planned_steps: int | None
    best: float | None
    best_of: str
    size_bytes: int
    began: float
    checkpoints: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class PlannedRegion:
    times: int


@dataclass(frozen=True)
class PlannedMetric:
    node: str
    port: str


@dataclass(frozen=True)
class PlannedEvaluation:
    metric: PlannedMetric


@dataclass(frozen=True)
class PlannedGraph:
    regions: tuple[PlannedRegion, ...]
    evaluation: PlannedEvaluation | None = None


@dataclass(frozen=True)
class PlannedStep:
    graph: PlannedGraph


@dataclass(frozen=True)
class PlannedRun:
    """What is read of plan.json."""

    step: PlannedStep


_LINE, _PLAN = TypeAdapter(dict[str, Any]), TypeAdapter(PlannedRun)


def list_runs(folder: Path) -> list[ListedRun]:
    """Those that lie in `folder`, the newest last. Raises OSError where it cannot be listed."""
    found = [listed_run(path) for path in folder.iterdir() if is_run(path)]
    return sorted(found, key=lambda run: (run.began, run.name))


def is_run(path: Path) -> bool:
    """Whether a path is that of a run's folder."""
    return all(_is_file(path / name) for name in MARKS)


def listed_run(path: Path) -> ListedRun:
    summary, metrics, plan = read_summary(path), _metrics(path), _plan(path)
    best, best_of = best_score(path, summary, metrics, _evaluated(plan))
    return ListedRun(
        path,
        run_status(path, summary),
        metrics[-1]["step"] + 1 if metrics else summary.steps if summary else 0,
        next((region.times for region in plan.step.graph.regions), None) if plan else None,
        best,
        best_of,
        size_on_disk(path),
        _began(path),
        tuple(sorted(step for step, folder in checkpoint_folders(path) if _is_file(folder / MANIFEST))),
    )


def checkpoint_folders(run: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of every checkpoint, whole or not; links are none, and lead to none."""
    folder = run / CHECKPOINTS
    with suppress(OSError):
        for path in () if folder.is_symlink() else folder.iterdir():
            named = _STEP.fullmatch(path.name)
            if named and path.is_dir() and not path.is_symlink():
                yield int(named[1]), path


def size_on_disk(folder: Path) -> int:
    """Bytes that would be free without the folder; links are not followed, and a file of two names within it
    counts once."""
    found: dict[tuple[int, int], int] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):  # it has gone meanwhile
                entry = (Path(parent) / name).lstat()
                found[entry.st_dev, entry.st_ino] = entry.st_blocks * 512
    return sum(found.values())


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines, which have a step; none where the file cannot be read."""
    found: list[dict[str, Any]] = []
    with suppress(UnreadableError):
        for line in read_bytes(run / "metrics.jsonl", MAX_READ_BYTES).splitlines():
            with suppress(ValidationError):  # a part of a line, when a run was killed
                found.append(_LINE.validate_json(line))
    return [line for line in found if type(line.get("step")) is int]


def _plan(run: Path) -> PlannedRun | None:
    try:
        return _PLAN.validate_json(read_bytes(run / "plan.json", MAX_READ_BYTES))
    except (UnreadableError, ValidationError):
        return None


def _evaluated(plan: PlannedRun | None) -> str:
    """The metric of `eval`, such as ``reward.score``."""
    evaluation = plan.step.graph.evaluation if plan else None
    return f"{evaluation.metric.node}.{evaluation.metric.port}" if evaluation else ""


def _began(run: Path) -> float:
    """The plan is written when a run begins, and never again."""
    try:
        return (run / "plan.json").stat().st_mtime
    except OSError:
        return 0.0
