"""math-verify in its own process: verdicts, time limits, crashes, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from hflow.ops.math_judge import MathJudge
from hflow.ops.rewards import math_verify

pytest.importorskip("math_verify")

TOWER = "$9^{9^{9^{9}}}$"  # sympy computes it, digit by digit, in one call that never returns


@pytest.fixture
def judge() -> Iterator[MathJudge]:
    judge = MathJudge()
    yield judge
    judge.close()


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_equal_as_mathematics() -> None:
    text = [
        ["so it is $0.5$.", "\\boxed{\\frac{2}{4}}", "1/2", "0.51", ""],
        ["$1+x^2$", "x", "2", "$x$", "-"],
    ]
    found = math_verify(text, ["1/2", "x^2+1"])
    assert found.dtype == torch.float32
    assert found.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("answer", ["\\frac{1}{2}", "$\\frac{1}{2}$", "\\boxed{\\frac{1}{2}}", "0.5"])
def test_answers_with_and_without_marks(answer: str) -> None:
    assert math_verify([["$\\frac{1}{2}$", "$\\frac{1}{3}$"]], [answer]).tolist() == [[1.0, 0.0]]


def test_an_answer_in_dollars() -> None:
    """As MATH has them."""
    text = ["\\boxed{18.90}", "\\boxed{\\$18.90}", "$18$"]
    assert math_verify([text], ["\\$18.90"]).tolist() == [[1, 1, 0]]


def test_the_last_box_or_all_of_them_count() -> None:
    text = "First \\boxed{3}. No, step 2 is wrong: \\boxed{4}. That is all, 5."
    assert math_verify([[text]] * 4, ["4", "3", "5", "\\{3,4\\}"]).tolist() == [[1], [0], [0], [1]]


def test_an_answer_without_an_expression_is_an_error() -> None:
    with pytest.raises(ValueError, match="answer ' ' holds no mathematical expression"):
        math_verify([["1"]], [" "])


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_the_time_limit_is_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        math_verify([["1"]], ["1"], timeout_s=timeout_s)


def test_one_process_judges_many(judge: MathJudge) -> None:
    assert judge.equal("1", "1", 5)
    pid = judge.pid
    assert pid is not None
    assert [judge.equal(str(i), "3", 5) for i in range(5)] == [False, False, False, True, False]
    assert judge.pid == pid


def test_a_hung_item_scores_0_and_the_next_is_judged(judge: MathJudge) -> None:
    assert judge.equal("1", "1", 5)
    first, start = judge.pid, time.monotonic()
    assert first is not None
    assert not judge.equal(TOWER, "1", 0.5)
    assert time.monotonic() - start < 5
    assert gone(first)
    assert judge.equal("1", "1", 5) and judge.pid != first


def test_a_killed_process_is_replaced(judge: MathJudge) -> None:
    assert judge.equal("1", "1", 5)
    first = judge.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: gone(first))
    assert judge.equal("1", "1", 5) and judge.pid != first


def test_strange_texts_score_0(judge: MathJudge) -> None:
    for text in ("\x00", "\ud800", "$" + "{" * 500, "1\n" * 500, "\\boxed{", "$\\frac{1}{0}$"):
        assert not judge.equal(text, "2", 2)


def test_closing_ends_the_process(judge: MathJudge) -> None:
    assert judge.equal("1", "1", 5)
    pid = judge.pid
    assert pid is not None
    judge.close()
    assert gone(pid) and judge.pid is None
    judge.close()


PARENT = f"""
import os, sys, threading, time
from hflow.ops.math_judge import MathJudge
judge = MathJudge()
judge.equal("1", "1", 5)
print(judge.pid, flush=True)
if sys.argv[1] == "busy":
    threading.Thread(target=judge.equal, args=({TOWER!r}, "1", 2.0), daemon=True).start()
if sys.argv[1] == "forked" and os.fork() == 0:  # holds the pipes open for longer than the parent lives
    time.sleep(8)
    os._exit(0)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy", "forked"])
def test_no_orphan_when_the_parent_is_killed(state: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)  # the busy one is in the middle of its item
        assert not gone(child)
        parent.kill()
        parent.wait()
        assert eventually(lambda: gone(child), limit_s=5)


def test_a_missing_package_is_named(judge: MathJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name)
    )
    with pytest.raises(ImportError, match=r"pip install -e .\.\[math\]"):
        judge.equal("1", "1", 5)


def test_a_process_that_does_not_start_is_an_error(judge: MathJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="does not start"):
        judge.equal("1", "1", 5)
