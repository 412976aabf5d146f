"""What is said to have ended a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.runtime.engines.sglang.log import LAST_LINES, cause, last_lines

TRACEBACKS = """\
[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("ValueError: in the source")
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
RuntimeError: what follows from it
"""
KILLED = "[2026-01-01] Subprocess scheduler_1 (pid=7) crashed with exit code {code}. Triggering SIGQUIT"
RAISED = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACEBACKS, RAISED),
        (TRACEBACKS + KILLED.format(code=-9), "Subprocess scheduler_1 (pid=7) crashed with exit code -9"),
        (TRACEBACKS + KILLED.format(code=1), RAISED),
        ("loading\nan Error: of no traceback\n", ""),
        ("", ""),
    ],
    ids=["first traceback", "killed", "ended by the exception", "nothing", "empty"],
)  # fmt: skip
def test_the_cause_is_the_first_that_is_told(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "log").write_text(text)
    assert cause(tmp_path / "log") == expected


def test_only_the_last_lines_are_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\n" + b"".join(b"%d\n" % i for i in range(100)))
    lines = last_lines(tmp_path / "log").splitlines()
    assert len(lines) == LAST_LINES and lines[-1] == "  99"
