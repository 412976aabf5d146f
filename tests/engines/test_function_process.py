"""What functions may do to their process, and what the worker tells of it. The processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hflow.graph.ir import Function, Input, Node, Output, Ref
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.runtime.engines.protocol import EngineCall, NodeError, Stopped
from hflow.runtime.engines.python.call import run_call
from hflow.runtime.engines.python.engine import PythonEngine, runs_apart
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.engines.python.written_lines import CHARACTERS, MOST, WrittenLines
from hflow.runtime.rows import Rows

pytestmark = pytest.mark.slow
NUMBERS = ValueType("f32", (Dim((Factor("rows", 4, "prompts"),)),))
SIGNATURE = "x: f32[rows] -> y: f32[rows]"
GONE_S = 10

FILE = Path(__file__).with_name("misbehaving.py")


def line_of(name: str) -> int:
    """The first in a function."""
    lines = FILE.read_text().splitlines()
    return 2 + next(number for number, line in enumerate(lines) if line.startswith(f"def {name}("))


LINES = {name: line_of(name) for name in ("crash", "raises", "exits")}


@pytest.fixture
def process() -> Iterator[FunctionProcess]:
    process = FunctionProcess([], threading.Event())
    yield process
    process.end()


@pytest.fixture(scope="module")
def lasting() -> Iterator[FunctionProcess]:
    """For functions that do nothing to it."""
    process = FunctionProcess([], threading.Event())
    yield process
    process.end()


def call_of(file: Path | str, name: str, **options: Any) -> EngineCall:
    node = Node(
        "judge",
        "call",
        function=Function(f"{file}:{name}", SIGNATURE),
        inputs=(Input("x", Ref("source", "x"), NUMBERS),),
        outputs=(Output("y", NUMBERS),),
        options=options,
    )
    plan = NodePlan("judge", "call", None, "python", Mesh.of((0,)), 1, 0.0, 0.0, 0)
    return EngineCall(node, plan, 0, 4, seed=0, step=1)


def rows(*values: float) -> dict[str, Rows]:
    return {"x": Rows(torch.tensor(values or (1.0, 2.0, 3.0, 4.0)))}


def run(process: FunctionProcess, name: str, **options: Any) -> list[float]:
    return process.run(call_of(FILE, name, **options), rows()).outputs["y"].values.tolist()


def family_of(process: FunctionProcess) -> list[psutil.Process]:
    """All of its processes: its own, the one that guards it, and what functions have started."""
    number = process._process.pid
    found = [p for p in psutil.process_iter() if _session_of(p.pid) == number]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]  # of an orphan, for process 1 to reap


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, GONE_S)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    "name,told",
    [
        ("crash", r"was ended by signal 11 \(SIGSEGV\)\nThe end of its stderr:[\s\S]*line {crash} in crash"),
        ("leave", "ended its process with exit code 3$"),
        ("killed", r"was ended by signal 9 \(SIGKILL\), as the kernel does when memory runs out"),
        ("speaks_last", "exit code 1\nThe end of its stderr:\n  the last words$"),
        ("writes_slowly", "exit code 1\nThe end of its stderr:\n  the last words$"),
        ("forks_and_stays", "exit code 4"),
        ("closes", r"exit code 1\n[\s\S]*Bad file descriptor$"),
        ("scribbles", "wrote to, or closed, what is hflow's in its process"),
    ],
)
def test_an_end_is_told_and_leaves_nothing(process: FunctionProcess, name: str, told: str) -> None:
    assert run(process, "double") == [2, 4, 6, 8]
    family = family_of(process)
    assert len(family) == 2  # with its guard
    with pytest.raises(NodeError, match=told.format(**LINES)) as caught:
        run(process, name)
    assert (caught.value.node, caught.value.code) == ("judge", "HF401")
    assert caught.value.message.startswith(f"`{FILE}:{name}` ")
    assert not process.alive
    assert_gone([*family, *family_of(process)])


@pytest.mark.parametrize(
    "name,told",
    [
        ("raises", "misbehaving.py:{raises}: ZeroDivisionError"),
        ("exits", r"misbehaving.py:{exits}: called sys.exit\(3\)"),
        ("interrupts", "KeyboardInterrupt"),
        ("junk", "`y` cannot be made a tensor"),
        ("wrong_shape", r"`y` has shape \[1\]"),
    ],
)
def test_what_a_function_raises_is_told_as_in_the_worker(
    lasting: FunctionProcess, name: str, told: str
) -> None:
    """And the process goes on."""
    call = call_of(FILE, name)
    with pytest.raises(NodeError, match=told.format(**LINES)) as apart:
        lasting.run(call, rows())
    if name != "interrupts":  # in the worker, that ends the run
        with pytest.raises(NodeError) as here:
            run_call(call, rows())
        assert (apart.value.message, apart.value.code) == (here.value.message, here.value.code)
    if name in ("raises", "exits"):
        assert f'File "{FILE}"' in apart.value.trace
    assert run(lasting, "double") == [2, 4, 6, 8]


@pytest.mark.parametrize("name", ["for_ever", "holds_the_lock"])
def test_a_time_limit_ends_it_and_tells_where_it_was(process: FunctionProcess, name: str) -> None:
    assert run(process, "slow", timeout_s=60.0) == [1, 2, 3, 4]
    began = time.monotonic()
    first = line_of(name)
    told = rf"did not return within 0.5 s \(`timeout_s`\)[\s\S]*line ({first}|{first + 1}) in {name}"
    with pytest.raises(NodeError, match=told):
        run(process, name, timeout_s=0.5)
    assert 0.5 < time.monotonic() - began < 10
    assert not process.alive


def test_a_process_that_is_stopped_has_its_time_limit(process: FunctionProcess) -> None:
    run(process, "double")
    os.kill(process._pid or 0, signal.SIGSTOP)
    with pytest.raises(NodeError, match="did not return within 0.3 s"):
        run(process, "double", timeout_s=0.3)


def test_the_limit_leaves_out_the_start(process: FunctionProcess) -> None:
    assert run(process, "double", timeout_s=0.5) == [2, 4, 6, 8]  # Python and torch take longer


@pytest.mark.parametrize("is_ready", [False, True])
def test_when_another_worker_fails_nobody_waits(process: FunctionProcess, is_ready: bool) -> None:
    if is_ready:
        run(process, "double")
    threading.Timer(0.3, process.stopped.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        run(process, "for_ever")
    assert time.monotonic() - began < 3
    assert not process.alive
    assert_gone(family_of(process))


def test_output_goes_where_the_workers_goes(capfd: pytest.CaptureFixture[str]) -> None:
    process = FunctionProcess([], threading.Event())
    assert run(process, "prints") == [1, 2, 3, 4]
    process.end()
    out, err = capfd.readouterr()
    counts = out.count("y"), err.count("z")  # not the texts: pytest would show them
    assert counts == (50_000_000, 50_000_000)


def test_what_functions_write_is_kept_by_node() -> None:
    process = FunctionProcess([], threading.Event())
    assert run(process, "warns") == [1, 2, 3, 4]
    process.end()
    lines, left_out = process.written.take()
    texts = [text for _, text in lines]
    assert {node for node, _ in lines} == {"judge"} and left_out == 0
    assert "one" in texts and "four" in texts and "five" in texts
    assert any(text.endswith("UserWarning: two") for text in texts)
    assert process.written.take() == ([], 0)


def test_of_many_lines_the_first_are_kept() -> None:
    written = WrittenLines("reward")
    for number in range(MOST + 30):
        written.add(b"\xff" + b"x" * number + b" \r")
    lines, left_out = written.take()
    assert lines[2] == ("reward", "\ufffdxx") and (len(lines), left_out) == (MOST, 30)
    written.add(b"y" * 2 * CHARACTERS)
    assert written.take() == ([("reward", "y" * CHARACTERS)], 0)


def test_a_fork_that_comes_back_answers_nothing(process: FunctionProcess) -> None:
    for _ in range(3):
        assert run(process, "forks") == [1, 2, 3, 4]
    assert run(process, "double") == [2, 4, 6, 8]


def test_a_module_keeps_what_it_knows(process: FunctionProcess) -> None:
    assert [run(process, "counts")[0] for _ in range(3)] == [1, 2, 3]


def test_it_is_like_the_worker(process: FunctionProcess) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            _, guard, has, _ = run(process, "where")
            assert (guard, has) == (process._process.pid, threads)
            apart, here = (do(call_of(FILE, "sums"), rows()) for do in (process.run, run_call))
            assert torch.equal(apart.outputs["y"].values, here.outputs["y"].values)
            assert apart.metrics == here.metrics
    finally:
        torch.set_num_threads(before)


def test_a_relative_file_is_found_where_the_worker_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parent)
    process = FunctionProcess([f"./{FILE.name}:double"], threading.Event())
    assert process.run(call_of(f"./{FILE.name}", "double"), rows()).outputs["y"].values.tolist() == [
        2,
        4,
        6,
        8,
    ]
    process.end()


@pytest.mark.parametrize(
    "text,code,told",
    [
        ("import no_such_module", "HF205", "cannot be imported: ModuleNotFoundError"),
        ("import os; os._exit(5)", "HF401", "importing `.*mine.py:f` ended its process with exit code 5"),
        ("raise SystemExit(2)", "HF401", "SystemExit: 2"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_by_the_call(
    tmp_path: Path, text: str, code: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    process = FunctionProcess([f"{tmp_path}/mine.py:f"], threading.Event())
    with pytest.raises(NodeError, match=told) as caught:
        process.run(call_of(tmp_path / "mine.py", "f"), rows())
    assert caught.value.code == code
    process.end()


def test_it_imports_what_the_worker_can_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_there.py").write_text(FILE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    process = FunctionProcess(["only_there.double"], threading.Event())
    call = call_of("", "")
    function = Function("only_there.double", SIGNATURE)
    call = replace(call, node=replace(call.node, function=function))
    assert process.run(call, rows()).outputs["y"].values.tolist() == [2, 4, 6, 8]
    process.end()


def test_memory_that_a_function_keeps_is_not_the_workers(process: FunctionProcess) -> None:
    run(process, "double")
    own, before = psutil.Process(), psutil.Process().memory_info().rss
    for _ in range(4):
        run(process, "leaks")  # 100 MB each
    assert own.memory_info().rss - before < 50e6
    assert psutil.Process(process._pid).memory_info().rss > 400e6


WORKER = """
import sys, threading, time
from hflow.runtime.engines.python.function_process import FunctionProcess
from tests.engines.test_function_process import FILE, call_of, rows
thread = threading.Thread(target=lambda: globals().update(made=FunctionProcess([], threading.Event())))
thread.start()
thread.join()  # the thread that started it ends, as threads of workers may: nothing must happen
print(*map(int, made.run(call_of(FILE, "starts"), rows()).outputs["y"].values.tolist()[:2]), flush=True)
made.run(call_of(FILE, sys.argv[1]), rows())
time.sleep(1000)
"""


@pytest.mark.parametrize("doing", ["slow", "for_ever", "holds_the_lock"])
def test_it_ends_with_a_worker_that_is_killed(doing: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, doing],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert worker.stdout
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    time.sleep(0.5)
    family = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
    assert len(family) == 4 and set(pids) < {p.pid for p in family}  # function, its child, guard
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert_gone(family[1:])


def test_functions_of_users_and_those_with_a_limit_run_apart() -> None:
    ours = "hflow.ops.rewards.exact_match"
    for reference, options, apart in (
        (ours, {}, False),
        (ours, {"timeout_s": 1.0}, True),
        ("hflows.mine.f", {}, True),
        ("./hflow.py:f", {}, True),
    ):
        other = Node("n", "call", function=Function(reference, SIGNATURE), options=options)
        assert runs_apart(other) is apart


def test_without_a_process_a_limit_is_told_to_have_no_effect_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = PythonEngine({})
    for _ in range(2):
        engine.run(call_of(FILE, "double", timeout_s=0.001), rows())
    told = [record.getMessage() for record in caplog.records]
    assert told == ["judge: nothing enforces `timeout_s` in this process"]
