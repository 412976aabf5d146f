"""What a run has left, and whether it is still running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.runtime.controller.former_run import former_run


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        yield sleeper.pid
        sleeper.kill()


@pytest.fixture
def run(tmp_path: Path, process: int) -> Path:
    """The folder of a run whose summary says that this process runs it."""
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "plan.json").touch()
    summary = {"status": "running", "pid": process, "host": socket.gethostname()}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_a_run_that_goes_on_is_refused(run: Path) -> None:
    with pytest.raises(HflowError, match="still running"):
        former_run(run, lambda _: None)


def test_a_process_that_began_later_is_another_one(run: Path) -> None:
    """In a container that was made anew, the same number on a host of the same name."""
    before = time.time() - 3600
    os.utime(run / "summary.json", (before, before))
    assert former_run(run, lambda _: None).step == 0
