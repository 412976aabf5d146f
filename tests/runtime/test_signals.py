"""Signals at any moment of a run: the exit code, the summary, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hflow.diagnostics import Terminated
from hflow.ending_signals import EndingSignals
from hflow.runtime.tools.new_model import new_model
from tests.runtime.test_failures import DEADLINE_S, HFLOW

FOLDER = Path(__file__).parent
GRAPH = FOLDER / "grpo_small.yaml"
START_S = 5.0  # that Ray and a worker take to start on two cores, about
LEAVE_S = 20.0  # for processes that end by themselves
SOON = random.Random(17)


def within(first: float, last: float) -> float:
    """Seconds after the run folder is there, of shares of the start."""
    return round(SOON.uniform(first * START_S, last * START_S), 2)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run puts its temporary files, which tells its processes from all others. Its name is short,
    since Ray's sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    for process in processes(folder):
        process.kill()
    shutil.rmtree(folder)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and then Python installs no handler of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def processes(temporary: Path) -> list[psutil.Process]:
    """Those that have inherited the run's environment; a worker's own folder is in that."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                found.append(process)
    return found


def start(run_dir: Path, model: Path, *more: str) -> subprocess.Popen[str]:
    graph = [str(GRAPH), "--set", f"params.model={model}", "--run-dir", str(run_dir)]
    command = [*HFLOW, "exec", *graph, "--cluster", "local1", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals
    )


def heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the process has printed when `text` is among it. The rest stays in the pipe."""
    assert process.stdout
    told, deadline = b"", time.monotonic() + DEADLINE_S
    while text.encode() not in told:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        read = os.read(process.stdout.fileno(), 2**16) if ready else b""
        assert read, told
        told += read
    return told.decode()


def assert_ended(process: subprocess.Popen[str], code: int, run_dir: Path, temporary: Path) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, output
    assert "Traceback" not in output and "***" not in output, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted", output
    _, alive = psutil.wait_procs(processes(temporary), LEAVE_S)
    assert not alive, [p.cmdline() for p in alive]
    assert not list(temporary.iterdir())
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "delay"),
    [
        (signal.SIGTERM, 143, within(0.0, 0.4)),
        (signal.SIGTERM, 143, within(0.4, 0.8)),
        (signal.SIGINT, 130, within(0.0, 0.6)),
        (signal.SIGHUP, 129, within(0.6, 1.2)),
    ],
)
def test_one_signal_while_ray_starts(
    number: int, code: int, delay: float, tiny_model: Path, tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, tiny_model, "--set", "params.steps=5000")
    wait_until(process, run_dir.is_dir)
    time.sleep(delay)
    process.send_signal(number)
    output = assert_ended(process, code, run_dir, temporary)
    assert f"{signal.Signals(number).name}: ending the workers and completing {run_dir}" in output


@pytest.mark.slow
@pytest.mark.parametrize("delay", [within(0.1, 0.8) for _ in range(2)])
def test_a_second_signal_does_not_stop_the_cleaning_up(
    delay: float, tiny_model: Path, tmp_path: Path, temporary: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, tiny_model, "--set", "params.steps=5000")
    wait_until(process, run_dir.is_dir)
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    begun = read_until(process, "ending the workers")  # of two signals at once, Python hears as of one
    time.sleep(SOON.uniform(0.2, 0.3))
    process.send_signal(signal.SIGSTOP)  # or it may end after the look at its summary
    has_ended = json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    told = assert_ended(process, 143, run_dir, temporary)
    assert has_ended or "still ending" in begun + told, begun + told
    assert "Traceback" not in begun


RAY_FROM_START_TO_END = f"""
import os, sys
sys.path.insert(0, {str(Path.cwd())!r})
from hflow.runtime.controller.local_ray import LocalRay
from hflow.ending_signals import EndingSignals
local = LocalRay()
from hflow.runtime.controller.ray_session import RaySession, let_ray_take_its_signals
from tests.runtime.test_signals import catches
with EndingSignals() as signals:
    let_ray_take_its_signals()
    signals.install()
    session = RaySession()
    session.start(1, local)
    print(catches(os.getpid(), {signal.SIGTERM:d}))
    session.end()
    print(catches(os.getpid(), {signal.SIGTERM:d}))
    os.kill(os.getpid(), {signal.SIGTERM:d})
    print(signals.asked)
local.remove()
"""


@pytest.mark.slow
def test_ray_leaves_sigterm_to_us_when_it_shuts_down(temporary: Path) -> None:
    """Its own shutdown would put the default action back, which kills."""
    command = [sys.executable, "-c", RAY_FROM_START_TO_END]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.stdout.splitlines() == ["True", "True", "[15]"], ended
    _, alive = psutil.wait_procs(processes(temporary), LEAVE_S)
    assert not alive, [p.cmdline() for p in alive]


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_ctrl_c_in_export_leaves_no_half_model(tmp_path: Path, temporary: Path) -> None:
    """The worker is stopped while it writes, so that it is killed there."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    new_model(model, layers=4, hidden=512, max_positions=64)
    process = start(run_dir, model, "--set", "params.steps=1")
    wait_until(process, lambda: any((run_dir / "export").glob(".actor-*")))
    worker = next(p for p in processes(temporary) if "RayWorker" in " ".join(p.cmdline()))
    worker.suspend()
    assert list((run_dir / "export").glob(".actor-*")), "it was stopped too late"
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    worker.kill()
    assert_ended(process, 130, run_dir, temporary)
    assert not list((run_dir / "export").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_while_compiling(number: int, code: int, tiny_model: Path, tiny_reward: Path) -> None:
    models = ["--set", f"params.model={tiny_model}", "--set", f"params.reward_model={tiny_reward}"]
    command = [*HFLOW, "compile", "algorithms/ppo.yaml", *models, "--cluster", "h100x128"]
    process = subprocess.Popen(
        [*command, "--planner", "exhaustive"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals,
    )  # fmt: skip
    wait_until(process, lambda: catches(process.pid, signal.SIGTERM))
    time.sleep(SOON.uniform(0.0, 1.5))
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code and "Traceback" not in output, output


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


def test_a_signal_waits_for_where_it_may_raise() -> None:
    with EndingSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.asked == [signal.SIGTERM]
        with pytest.raises(Terminated), signals.interruptible():
            raise AssertionError("entered")


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_the_first_signal_raises_the_second_does_not_and_the_third_does_anywhere() -> None:
    cleaned: list[str] = []
    with EndingSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            try:
                with signals.interruptible():
                    signal.raise_signal(signal.SIGINT)
                    raise AssertionError("not interrupted")
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleaned.append("all")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert cleaned == ["all"]


def test_a_swallowed_signal_raises_at_the_end() -> None:
    with EndingSignals() as signals, pytest.raises(Terminated), signals.interruptible():
        swallow(lambda: signal.raise_signal(signal.SIGTERM))


def swallow(function: Callable[[], None]) -> None:
    with suppress(BaseException):
        function()


def test_nested_signals_share_what_was_asked_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with EndingSignals() as outer, pytest.raises(Terminated), outer.interruptible():
        with EndingSignals() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert inner.asked == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
