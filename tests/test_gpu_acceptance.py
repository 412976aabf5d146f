"""The trial of a GPU, without one: how stages are told, and that those which need CUDA are never `ok`.

`scripts/gpu_acceptance.sh --device cpu` runs them all; here are those that take seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from scripts.gpu_acceptance import __main__ as acceptance

PYTHON = sys.executable
STAGES = tuple(acceptance.LIMITS_S)


def tried(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = ["scripts/gpu_acceptance.sh", "--folder", str(folder), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHON": PYTHON})
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_stage_is_a_file_and_can_be_asked_for() -> None:
    files = {file.stem for file in Path("scripts/gpu_acceptance").glob("*.py")}
    parts = {"__init__", "__main__", "stage", "models", "runs", "update", "rewards"}
    assert files - parts == set(STAGES)


def test_all_take_no_longer_than_a_lease() -> None:
    """Stages take less than their limits; together these may be no more than twice ten minutes."""
    assert sum(acceptance.LIMITS_S.values()) <= 20 * 60


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_stages_on_a_cpu(tmp_path: Path) -> None:
    code, found = tried(tmp_path, "--device", "cpu", "handover", "numerics")
    assert [stage["stage"] for stage in found] == ["handover", "numerics"]
    assert [stage["state"] for stage in found] == ["skipped", "skipped"], found
    assert all(stage["message"] and stage["seconds"] > 0 for stage in found)
    assert found[0]["child"].startswith("weights cpu ") and found[1]["greedy_rows_equal"] > 0
    assert code == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_the_others_run_after_one_that_failed(tmp_path: Path) -> None:
    code, found = tried(tmp_path, "handover", "out_of_memory")
    assert [stage["state"] for stage in found] == ["failed", "failed"]
    assert all(stage["message"] == "torch finds no CUDA device" for stage in found)
    assert code == 1


def stage_of(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path, limit_s: float) -> dict[str, Any]:
    """What is told of a stage whose program is `text`."""
    (folder / "trial.py").write_text(text)
    monkeypatch.setitem(acceptance.LIMITS_S, "doctor", limit_s)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(acceptance.sys, "executable", str(folder / "python"))
    (folder / "python").write_text(f"#!/bin/sh\nexec {PYTHON} {folder / 'trial.py'}\n")
    (folder / "python").chmod(0o755)
    return acceptance._run("doctor", "cuda", folder)


def test_a_stage_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
open("{}", "w").write(str(child.pid))
time.sleep(60)
""".format(tmp_path / "child")
    found = stage_of(text, monkeypatch, tmp_path, 2)
    assert (found["state"], found["message"]) == ("failed", "no end within 2 s")
    child = int((tmp_path / "child").read_text())
    with suppress(psutil.NoSuchProcess):
        _, alive = psutil.wait_procs([psutil.Process(child)], timeout=5)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_stage_that_crashes_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stage_of("raise ValueError('no such kernel')", monkeypatch, tmp_path, 30)
    assert (found["state"], found["message"]) == ("failed", "ValueError: no such kernel")
    silent = stage_of("import os; os.abort()", monkeypatch, tmp_path, 30)
    assert (silent["state"], silent["message"]) == ("failed", "exit code -6")
