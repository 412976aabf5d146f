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

from hflow.cli.resume import named
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


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_a_run_without_checkpoints_begins_anew(run: Path, status: str) -> None:
    (run / "summary.json").write_text(json.dumps({"status": status}))
    assert former_run(run, lambda _: None).step == 0


def test_but_not_one_that_has_finished(run: Path) -> None:
    """It would train again what it has trained, and write over its models."""
    (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 5}))
    with pytest.raises(HflowError) as caught:
        former_run(run, lambda _: None)
    assert "params.model" not in caught.value.diagnostics[0].help
    (run / "export/actor").mkdir(parents=True)
    with pytest.raises(HflowError, match="has finished, and left no checkpoint") as caught:
        former_run(run, lambda _: None)
    assert f"`--set params.model={run}/export/actor`" in caught.value.diagnostics[0].help


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/first", "runs/second", "second"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "plan.json").touch()
    assert named(Path("first")) == Path("runs/first")
    assert named(Path("runs/first")) == Path("runs/first")
    assert named(Path("second")) == Path("second")
    assert named(Path("third")) == Path("third")
