"""Runs that hang, on real workers: they are told of, and fail or begin again. And runs that only seem to."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.runtime.matrix import GRAPHS
from tests.runtime.skipping import PINS, STEPS
from tests.runtime.test_failures import DEADLINE_S, HFLOW, assert_all_gone, command_line, descendants, finish
from tests.runtime.test_hosts import RayNodes, cluster_file, nodes  # noqa: F401  (a fixture)
from tests.runtime.test_resume import metrics_of, weights
from tests.runtime.test_signals import heed_signals, wait_until

pytestmark = pytest.mark.slow
# An instruction of these runs takes milliseconds, and hardly ever some seconds on a machine with other load.
LEAST_S = 12
HANG = ["--set", f"run.hang={{least: {LEAST_S}, first: 150}}"]
RESTARTS = ["--set", "run.checkpoint.every=1", "--set", "run.restarts=1"]
ONCE = '''

@op("text: str[rows] -> length: f32[rows]")
def length(text: list[str]) -> list[float]:
    """When it is called for the fifth time, once, something happens."""
    import pathlib, time

    calls = pathlib.Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if calls.stat().st_size == 5:
        HAPPENS
    return [float(len(t)) for t in text]
'''
WAITS = "[time.sleep(0.1) for _ in iter(pathlib.Path(__file__).with_name('goes on').exists, True)]"
SEARCHES = "__import__('re').match('(a+)+$', 'a' * 64 + 'b')"  # for years
SLEEPS = "time.sleep(10**6)"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``hflow exec`` of graphs/lagged.yaml, where something `happens`, into the folder ``run``."""
    started: list[subprocess.Popen[str]] = []

    def start_one(happens: str, *more: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        shutil.copy(GRAPHS / "lagged.yaml", tmp_path)
        functions = (GRAPHS / "functions.py").read_text() + ONCE.replace("HAPPENS", happens)
        (tmp_path / "functions.py").write_text(functions)
        command = [*exec_command(tmp_path / "lagged.yaml", tiny_model, tmp_path / "run"), *more]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                preexec_fn=heed_signals,
            )
        )  # fmt: skip
        return started[-1]

    yield start_one
    for process in started:
        process.kill() if process.poll() is None else None


def exec_command(graph: Path, model: Path, run_dir: Path) -> list[str]:
    given = [f"params.model={model}", f"params.steps={STEPS}", "eval.every=1"]
    command = [*HFLOW, "exec", str(graph), "--cluster", "local4", "--run-dir", str(run_dir)]
    return command + [f"--pin={pin}" for pin in PINS] + [f"--set={text}" for text in given]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happened."""
    run = tmp_path_factory.mktemp("plain") / "run"
    subprocess.run(exec_command(GRAPHS / "lagged.yaml", tiny_model, run), check=True, capture_output=True)
    return run


def assert_equal(run: Path, plain: Path) -> None:
    assert metrics_of(run) == metrics_of(plain) and len(metrics_of(plain)) == STEPS
    ours, theirs = weights(run), weights(plain)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.rotating(6)
def test_a_stopped_worker_is_replaced(start: Start, plain: Path, tmp_path: Path) -> None:
    process = start(WAITS, *HANG, *RESTARTS)
    stopped = stop_worker(process, tmp_path, lambda: workers_among(descendants(process)))
    code, output = finish(process)
    run = tmp_path / "run"
    assert code == 0, output
    assert "has not answered" in output and "the process is stopped (SIGSTOP)" in output
    assert "the run hangs" in output and "going on from step" in output and "Traceback" not in output
    (slow,) = (event for event in events(run, "slow") if event["stopped"])  # others may be the machine's load
    (hung,) = events(run, "hung")
    assert slow["workers"] == hung["workers"] and hung["stopped"]
    assert slow["seconds"] < LEAST_S <= hung["seconds"]
    text = (run / hung["stacks"]).read_text()
    assert f"pid {stopped.pid}" in text and "interpreter.py" in text
    assert text.count("does not answer; state of its process: stopped") == 1
    assert not stopped.is_running()
    assert_equal(run, plain)


def stop_worker(
    process: subprocess.Popen[str], folder: Path, workers: Callable[[], list[psutil.Process]]
) -> psutil.Process:
    """Stop a worker while the function waits in one of them."""
    wait_for_call(process, folder)
    stopped = workers()[0]
    stopped.suspend()
    (folder / "goes on").touch()
    return stopped


def workers_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if any("ray::RayWorker" in word for word in command_line(p)[:1])]


@pytest.mark.rotating(6)
def test_a_function_that_never_returns(start: Start, tmp_path: Path) -> None:
    process = start(SLEEPS, *HANG)
    family = wait_for_call(process, tmp_path)
    code, output = finish(process)
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in output
    assert "error[HF413]: the run hangs: worker" in output and "lagged.yaml" in output, output
    (hung,) = events(run, "hung")
    assert not hung["silent"] and f"{run}/{hung['stacks']}" in output.replace("\n", "")
    stacks = (run / hung["stacks"]).read_text()
    assert "functions.py" in stacks and "in length" in stacks and "does not answer" not in stacks
    assert stacks.count("worker ") >= 3 and "HF413" in (run / "error.txt").read_text()
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert_all_gone(family)


def wait_for_call(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Until the function has been called for the fifth time; the processes of the run."""
    calls = folder / "calls"
    wait_until(process, lambda: calls.exists() and calls.stat().st_size >= 5)
    return descendants(process)


@pytest.mark.acceptance
def test_a_function_that_lets_no_other_thread_run(start: Start, tmp_path: Path) -> None:
    """In its own process: the stack is written by a signal's handler. Its worker answers all the time."""
    code, output = finish(start(SEARCHES, *HANG))
    assert code == 1 and "Traceback" not in output
    assert "error[HF413]: the run hangs: worker" in output and "in `length`" in output, output
    (hung,) = events(tmp_path / "run", "hung")
    assert not hung["silent"]
    stacks = (tmp_path / "run" / hung["stacks"]).read_text()
    assert "functions.py" in stacks and "in length" in stacks and "does not answer" not in stacks


@pytest.mark.acceptance
def test_a_collective_that_one_rank_skips(plain: Path, tiny_model: Path, tmp_path: Path) -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    command = [sys.executable, "-m", "tests.runtime.skipping", str(tiny_model), str(run), str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    (hung,) = events(run, "hung")
    assert 1 not in hung["workers"] and "actor => rollout" in hung["doing"]
    assert "worker 1" in done.stderr and "takes part in it, went on without" in done.stderr
    assert (run / hung["stacks"]).read_text().count("interpreter.py") >= 3
    assert mark.exists()
    assert_equal(run, plain)


@pytest.mark.acceptance
def test_the_second_ctrl_c_leaves_a_hung_run(start: Start, tmp_path: Path) -> None:
    process = start(WAITS)  # with deadlines of minutes
    stop_worker(process, tmp_path, lambda: workers_among(descendants(process)))
    family = descendants(process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and time.monotonic() - began < 40, output
    assert_all_gone(family)


@pytest.mark.acceptance
def test_a_run_that_was_stopped_as_a_whole_goes_on(start: Start, plain: Path, tmp_path: Path) -> None:
    """For longer than any instruction may take: a laptop, a debugger, SIGSTOP of a job."""
    process = start("time.sleep(5)", *HANG)
    everything = [psutil.Process(process.pid), *wait_for_call(process, tmp_path)]
    for one in everything:
        one.suspend()
    time.sleep(1.5 * LEAST_S)
    for one in reversed(everything):
        one.resume()
    code, output = finish(process)
    assert code == 0, output
    assert not events(tmp_path / "run", "hung")
    assert_equal(tmp_path / "run", plain)


@pytest.mark.acceptance
def test_a_step_that_takes_longer_than_those_before(start: Start, plain: Path, tmp_path: Path) -> None:
    """Each step's call takes five times as long as the one before, in the end longer than `least`."""
    lengthening = "pass\n    time.sleep(0.0024 * 5 ** calls.stat().st_size if len(text) > 8 else 0)"
    process = start(lengthening, "--set=run.hang={least: 5, first: 150}", "--set=eval.every=0")
    code, output = finish(process)
    assert code == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_s.length"] for line in lines]
    assert times == sorted(times) and times[-1] > 7
    assert not events(tmp_path / "run", "hung")


@pytest.mark.acceptance
def test_a_stopped_worker_on_another_node(
    start: Start,
    nodes: RayNodes,  # noqa: F811
    plain: Path,
    tmp_path: Path,
) -> None:
    """In a cluster that was there before; its workers are found and ended from their own nodes."""
    two_hosts = str(cluster_file(tmp_path, 2, 2))
    elsewhere = "--cluster", two_hosts, "--address", nodes.address
    process = start(WAITS, *HANG, *RESTARTS, *elsewhere, env=nodes.settings)
    stopped = stop_worker(process, tmp_path, lambda: workers_among(psutil.process_iter()))
    code, output = finish(process)
    assert code == 0, output
    assert "the process is stopped (SIGSTOP)" in output and "going on from step" in output
    assert not stopped.is_running()
    assert_equal(tmp_path / "run", plain)
