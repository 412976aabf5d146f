"""Whether a run goes on, has ended or has died: from its summary, and from the process that it names."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from hflow.bounded_read import UnreadableError, read_bytes

Status = Literal["running", "finished", "failed", "interrupted", "died", "unreadable"]
SUMMARY = "summary.json"
MAX_SUMMARY_BYTES = 2**20
MAX_CLOCK_STEP_S = 60.0  # a clock may be set while a run goes on, but by no more


@dataclass(frozen=True)
class EvaluationSummary:
    by_step: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class SummaryFile:
    """What is read of summary.json; `pid` and `host` are there while a run goes on."""

    status: Literal["running", "finished", "failed", "interrupted"]
    steps: Annotated[int, Field(ge=0)] = 0
    pid: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    host: str | None = None
    eval: EvaluationSummary | None = None
    evaluations: dict[str, EvaluationSummary] = field(default_factory=dict[str, EvaluationSummary])


_SUMMARY = TypeAdapter(SummaryFile)


def read_summary(run: Path) -> SummaryFile | None:
    """None where there is no summary, or a damaged one."""
    try:
        return _SUMMARY.validate_json(read_bytes(run / SUMMARY, MAX_SUMMARY_BYTES))
    except (UnreadableError, ValidationError):
        return None


def run_status(run: Path, summary: SummaryFile | None) -> Status:
    """`died`: the summary says that the run goes on, but its process on this host is gone. What runs on
    another host is believed."""
    if summary is None:
        return "unreadable"
    if summary.status != "running" or summary.pid is None or summary.host != socket.gethostname():
        return summary.status
    return "running" if _is_alive(summary.pid, _written(run)) else "died"


def _written(run: Path) -> float:
    try:
        return (run / SUMMARY).stat().st_mtime
    except OSError:  # it has gone meanwhile
        return 0.0


def _is_alive(pid: int, known_at: float) -> bool:
    """Whether the process that had a number at a time (seconds since 1970) is still there: not one that got
    the number later, and none that has ended and only waits to be noticed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    state, began = _process(pid)
    return state not in ("Z", "X") and began <= known_at + MAX_CLOCK_STEP_S


def _process(pid: int) -> tuple[str, float]:
    """State of a process, and when it began, as Linux tells; of any other system, or of one that has just
    ended, nothing, and 0."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_bytes().splitlines()
            if line.startswith(b"btime ")
        )
        return fields[0].decode(), boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, LookupError, ValueError, StopIteration):
        return "", 0.0
