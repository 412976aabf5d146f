"""A run that fails begins again by itself, and ends as one that did not."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.runtime.matrix import GRAPHS
from tests.runtime.test_failures import HFLOW, finish
from tests.runtime.test_resume import metrics_of, weights

STEPS = 6
FLAKY = '''

from contextlib import suppress
from pathlib import Path

steady, called = digits, []


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text: list[list[str]], answer: list[str]) -> list[list[float]]:
    """One process fails when it calls it for the fourth time, once."""
    called.append(1)
    if len(called) == 4:
        with suppress(FileExistsError):
            Path(__file__).with_name("has_failed").open("x")
            raise ConnectionError("the server is busy")
    return steady(text, answer)
'''


def run(folder: Path, name: str, graph: Path, model: Path, *sets: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, name, graph, model, *sets), capture_output=True, text=True)


def command(folder: Path, name: str, graph: Path, model: Path, *sets: str) -> list[str]:
    settings = (f"params.model={model}", f"params.steps={STEPS}", "run.checkpoint.every=1", *sets)
    return [
        *HFLOW, "exec", str(graph), "--cluster", "local", "--run-dir", str(folder / name),
        *(text for setting in settings for text in ("--set", setting)),
    ]  # fmt: skip


def assert_equal(ours: Path, theirs: Path) -> None:
    assert metrics_of(ours) == metrics_of(theirs) and len(metrics_of(ours)) == STEPS
    one, other = weights(ours), weights(theirs)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.acceptance
@pytest.mark.slow
def test_a_function_that_fails_now_and_then(tiny_model: Path, tmp_path: Path) -> None:
    """`retry` names its failure; without that the same run fails."""
    graph = tmp_path / "grpo_small.yaml"
    shutil.copy(GRAPHS.parent / graph.name, graph)
    (tmp_path / "rewards.py").write_text((GRAPHS.parent / "rewards.py").read_text() + FLAKY)
    sets, marker = ("run.restarts=1",), tmp_path / "has_failed"
    failed = run(tmp_path, "failed", graph, tiny_model, *sets)
    assert failed.returncode == 1 and "HF401" in failed.stderr and "going on" not in failed.stderr
    marker.unlink()
    retried = run(tmp_path, "retried", graph, tiny_model, *sets, "run.retry=HF401")
    assert retried.returncode == 0, retried.stderr
    assert "the server is busy" in retried.stderr and "going on from" in retried.stderr
    plain = run(tmp_path, "plain", graph, tiny_model, *sets)  # it has failed before
    assert plain.returncode == 0, plain.stderr
    assert_equal(tmp_path / "retried", tmp_path / "plain")


@pytest.mark.rotating(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", pytest.param("gcs_server", marks=pytest.mark.acceptance)])
def test_ray_itself_dies(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Without its GCS workers would go on, until Ray ended the controller after a minute."""
    graph = GRAPHS.parent / "grpo_small.yaml"
    process = subprocess.Popen(
        command(tmp_path, "killed", graph, tiny_model, "run.restarts=1"),
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    await_checkpoints(process, tmp_path / "killed", 2)
    [victim] = named(process, name)
    victim.kill()
    code, told = finish(process)
    assert code == 0 and "going on from step" in told and "Traceback" not in told, told
    assert run(tmp_path, "plain", graph, tiny_model).returncode == 0
    assert_equal(tmp_path / "killed", tmp_path / "plain")


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_a_worker_dies_while_it_starts(tiny_model: Path, tmp_path: Path) -> None:
    """Ray then has room for all workers again, also that of the one which had started."""
    graph = GRAPHS.parent / "grpo_small.yaml"
    process = subprocess.Popen(
        command(tmp_path, "killed", graph, tiny_model, "run.restarts=1", "run.wait=20"),
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(process, lambda: len(workers_of(process)) == 2)
    workers_of(process)[0].kill()
    code, told = finish(process)
    assert code == 0 and "a worker died while it started" in told and "Traceback" not in told, told
    assert "going on from the beginning" in told and len(metrics_of(tmp_path / "killed")) == STEPS, told


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_ray_dies_while_it_starts(tiny_model: Path, tmp_path: Path) -> None:
    """Ray raises a bare exception then, after half a minute; or, where it had just connected, says so and
    ends this process by itself."""
    process = subprocess.Popen(
        command(tmp_path, "killed", GRAPHS.parent / "grpo_small.yaml", tiny_model),
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(process, lambda: bool(named(process, "gcs_server")))
    named(process, "gcs_server")[0].kill()
    code, told = finish(process)
    reasons = "error[HF404]: Ray cannot be reached or started", "Failed to connect to GCS"
    assert code == 1 and any(reason in told for reason in reasons), told
    assert "Traceback" not in told, told


def named(controller: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process(controller.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.name() == name:
                found.append(process)
    return found


def workers_of(controller: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process(controller.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ray::RayWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def await_checkpoints(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    wait_for(process, lambda: len(checkpoints(folder)) >= count)


def wait_for(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "checkpoint"]
