"""Failures as a user meets them: the real command line, real processes, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
HFLOW = [sys.executable, "-m", "hflow.cli.app"]
DEADLINE_S = 400
SHARED_MEMORY = Path("/dev/shm")
ALONE = "--cluster", "local1"  # one worker, where nothing depends on others: the half of a start

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs; what a failed test leaves running ends with it."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: Any) -> subprocess.Popen[str]:
        started.append(_start(*arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def _start(graph: Path, model: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    command = [*HFLOW, "exec", str(graph), "--set", f"params.model={model}", "--run-dir", str(run_dir), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_heed_signals
    )


def _heed_signals() -> None:
    """A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    """Until the run has finished `count` steps."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        file = run_dir / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") >= count:
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.terminate()
    raise AssertionError(f"no {count} steps in {DEADLINE_S} s:\n{finish(process)}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, [p.cmdline() for p in alive]


@pytest.fixture
def breaking_graph(tmp_path: Path, failure: str) -> Path:
    """grpo_small.yaml with a reward function that raises in the second step."""
    functions = """
import sys

from hflow.ops.op import op

calls = 0

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text, answer):
    global calls
    calls += 1
    if calls > 2:  # the evaluation before the first step, and the first step
        FAILURE
    return [[1.0 * len(t) for t in samples] for samples in text]
"""
    (tmp_path / "rewards.py").write_text(functions.replace("FAILURE", failure))
    graph = tmp_path / "graph.yaml"
    graph.write_text((FOLDER / "grpo_small.yaml").read_text())
    return graph


@pytest.mark.rotating(6)
@pytest.mark.parametrize("failure", ["sys.exit(0)"])
def test_a_reward_cannot_end_the_run_silently(
    start: Start, breaking_graph: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    code, output = finish(start(breaking_graph, tiny_model, run_dir, *ALONE, "--workers", "inline"))
    assert code == 1 and "error[HF401]: node `reward` failed" in output and "called sys.exit(0)" in output
    assert f"details in {run_dir / 'error.txt'}" in output


@pytest.mark.rotating(6)
@pytest.mark.parametrize("failure", ['raise ZeroDivisionError("no such reward")'])
def test_node_failure_names_its_cause(
    start: Start, breaking_graph: Path, tiny_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(breaking_graph, tiny_model, run_dir, "--set", "params.steps=500", *ALONE)
    wait_for_steps(process, run_dir, 1)
    code, output = finish(process)
    assert code == 1
    assert "error[HF401]: node `reward` failed on worker" in output
    assert "ZeroDivisionError: no such reward" in output
    assert "Traceback" not in output
    assert "raise ZeroDivisionError" in (run_dir / "error.txt").read_text()  # the place, for the author
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert "no such reward" in (run_dir / "report.html").read_text()


CRASH = "import ctypes; ctypes.string_at(0)"
LOOP = "while True: pass"


@pytest.mark.rotating(6)
@pytest.mark.parametrize(
    ("failure", "limit", "told"),
    [
        (CRASH, (), ("was ended by signal 11 (SIGSEGV)", "in digits")),
        (LOOP, ("nodes.reward.with.timeout_s=2",), ("did not return within 2 s (`timeout_s`)", "in digits")),
    ],
)
def test_a_function_cannot_take_its_worker(
    start: Start, breaking_graph: Path, tiny_model: Path, tmp_path: Path, limit: tuple[str, ...], told: Any
) -> None:
    """The worker lives, tells what has happened, and no process is left."""
    run_dir = tmp_path / "run"
    sets = [word for text in ("params.steps=500", *limit) for word in ("--set", text)]
    process = start(breaking_graph, tiny_model, run_dir, *sets, *ALONE)
    wait_for_steps(process, run_dir, 1)
    processes = descendants(process)
    code, output = finish(process)
    assert code == 1
    assert "error[HF401]: node `reward` failed on worker 0" in output
    assert all(text in output for text in told)
    assert_all_gone(processes)


FIRST = """
        import os, pathlib, time
        try:
            os.open(pathlib.Path(__file__).with_name("first"), os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            while True:
                pass
        time.sleep(1)
        raise ZeroDivisionError("no such reward")
"""


@pytest.mark.rotating(6)
@pytest.mark.parametrize("failure", [FIRST.strip()])
def test_nobody_waits_for_a_function_when_another_worker_has_failed(
    start: Start, breaking_graph: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """One of two workers raises, the other one's function never returns."""
    run_dir = tmp_path / "run"
    options = "--set", "params.steps=500", "--cluster", "local", "--pin", "rollout=dp2@0-1"
    process = start(breaking_graph, tiny_model, run_dir, *options)
    wait_for_steps(process, run_dir, 1)
    processes, began = descendants(process), time.monotonic()
    code, output = finish(process)
    assert code == 1 and "ZeroDivisionError: no such reward" in output
    assert time.monotonic() - began < 60
    assert_all_gone(processes)


MEDDLE = """
        import gc
        from hflow.runtime.engines.sglang.server import Server
        if calls == 3:
            [s.post("/begin_weight_update") for s in gc.get_objects() if isinstance(s, Server)]
"""


@pytest.mark.rotating(6)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="make setup-sglang")
@pytest.mark.parametrize("failure", [MEDDLE.strip()])
def test_a_refused_weight_update_ends_the_run(
    start: Start, breaking_graph: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """In the second step somebody else begins to renew SGLang's weights, so that it refuses the run's: it
    does not train on with what older weights sample, and no process is left."""
    run_dir, before = tmp_path / "run", set(SHARED_MEMORY.glob("torch_*"))
    inline = "--workers", "inline"  # where the function finds the server
    options = "--set", "params.steps=500", "--engine", "rollout=sglang", *ALONE, *inline
    process = start(breaking_graph, tiny_model, run_dir, *options)
    wait_for_steps(process, run_dir, 1)
    processes = descendants(process)
    code, output = finish(process)
    assert code == 1
    assert "error[HF410]: node `rollout`" in output
    assert "session is already open" in output
    assert "Traceback" not in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert_all_gone(processes)
    assert not set(SHARED_MEMORY.glob("torch_*")) - before


@pytest.mark.rotating(6)
@pytest.mark.parametrize(
    ("number", "code", "cluster"), [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ALONE)]
)
def test_signals_end_everything(
    start: Start, number: int, code: int, cluster: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(FOLDER / "grpo_small.yaml", tiny_model, run_dir, "--set", "params.steps=5000", *cluster)
    wait_for_steps(process, run_dir, 2)
    family = descendants(process)
    folders = temporary_folders(family)
    assert any("raylet" in " ".join(p.cmdline()) for p in family) and folders
    assert all(f.stat().st_mode & 0o077 == 0 for f in folders), "others can reach Ray's token"
    process.send_signal(number)
    returned, output = finish(process)
    assert returned == code, output
    assert "Traceback" not in output
    assert_all_gone(family)
    assert not any(f.exists() for f in folders)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["steps"] >= 2
    assert (run_dir / "report.html").exists()


@pytest.mark.rotating(6)
def test_a_reader_that_leaves_does_not_end_the_run(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """`hflow exec … | head -1`"""
    run_dir = tmp_path / "run"
    process = start(FOLDER / "grpo_small.yaml", tiny_model, run_dir, "--set", "params.steps=3", *ALONE)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    process.wait(DEADLINE_S)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)


def test_killed_worker_is_reported(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(FOLDER / "grpo_small.yaml", tiny_model, run_dir, "--set", "params.steps=5000")
    wait_for_steps(process, run_dir, 2)
    family = descendants(process)
    worker = next(p for p in family if "RayWorker" in " ".join(p.cmdline()))
    os.kill(worker.pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 1
    assert "error[HF402]" in output and "the worker process died" in output, output
    assert_all_gone(family)


def test_a_killed_run_is_cleaned_up_after(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """SIGKILL leaves no chance to remove Ray's files; the next start does, and spares a living run's."""
    run_dirs = tmp_path / "killed", tmp_path / "living"
    killed, living = (
        start(FOLDER / "grpo_small.yaml", tiny_model, run_dir, "--set", "params.steps=5000", *ALONE)
        for run_dir in run_dirs
    )
    left, used = wait_for_ray(killed), wait_for_ray(living)
    killed.kill()
    finish(killed)
    start_again = "from hflow.runtime.controller.local_ray import LocalRay; LocalRay().remove()"
    subprocess.run([sys.executable, "-c", start_again], check=True)
    assert left and not any(folder.exists() for folder in left)
    assert used and all(folder.exists() for folder in used)
    living.send_signal(signal.SIGHUP)
    code, told = finish(living)
    assert code == 129, told
    assert not any(folder.exists() for folder in used)


def wait_for_ray(process: subprocess.Popen[str]) -> set[Path]:
    """Until the run's Ray has started workers. Returns its folders."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        family = descendants(process)
        if any("ray::" in name for p in family for name in command_line(p)):
            return temporary_folders(family)
        time.sleep(0.1)
    raise AssertionError(f"no Ray in {DEADLINE_S} s:\n{finish(process)}")


def command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def temporary_folders(family: list[psutil.Process]) -> set[Path]:
    """Folders of Ray sessions that hflow made, as their processes name them."""
    words = [word for p in family for word in command_line(p)]
    found = {
        part for word in words for part in word.replace("=", "/").split("/") if part.startswith("hflow-")
    }
    return {Path("/tmp") / name for name in found}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("check", "tests/bad/does_not_exist.yaml"), "HF001"),
        (("exec", "tests/runtime/grpo_small.yaml", "--set", "params.model=/nowhere"), "HF303"),
        (("exec", "tests/runtime/grpo_small.yaml", "--cluster", "nowhere.yaml"), "HF001"),
        (("exec", "clusters/local.yaml"), "HF101"),
        (("exec", "pyproject.json"), "HF001"),
        (("compile", "algorithms/sft.yaml", "--cluster", "somewhere/local4.yaml"), "HF001"),
        (("compile", "algorithms/sft.yaml", "--cluster", "locl"), "HF001"),
    ],
)
def test_user_errors_are_diagnostics(arguments: tuple[str, ...], code: str) -> None:
    done = subprocess.run([*HFLOW, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert f"error[{code}]" in done.stderr and "Traceback" not in done.stderr


def test_run_folder_is_never_overwritten(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("results")
    code, output = finish(start(FOLDER / "grpo_small.yaml", tiny_model, tmp_path))
    assert code == 1 and "error[HF407]" in output
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_missing_data_field_is_told_with_its_node(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    graph = tmp_path / "graph.yaml"
    text = (FOLDER / "grpo_small.yaml").read_text().replace("./rewards.py", f"{FOLDER}/rewards.py")
    graph.write_text(text.replace("{{ question }}", "{{ quesiton }}"))
    code, output = finish(start(graph, tiny_model, tmp_path / "run", *ALONE, "--workers", "inline"))
    assert code == 1
    assert "error[HF403]: node `prompts` failed" in output and "question" in output, output
