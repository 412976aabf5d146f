"""`hflow compile --what-if`: techniques of engines that there are not, in the table of sensitivities."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

import hflow as hf
from hflow.diagnostics import HflowError
from hflow.report.what_if import what_ifs

HFLOW = [sys.executable, "-m", "hflow.cli.app"]
LONG = ("params.model=shape:qwen2.5-7b", "params.max_new_tokens=4096", "nodes.rollout.lengths.mean=1000")
APART = ("--pin", "rollout=@0-7", "--pin", "actor_train=@8-15")
BOTH = ("speculative", "partial-rollouts=1.5")


def hflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HFLOW, "compile", *arguments], capture_output=True, text=True, timeout=240)


def asked(*techniques: str) -> tuple[str, ...]:
    settings = [word for setting in LONG for word in ("--set", setting)]
    options = [word for technique in techniques for word in ("--what-if", technique)]
    return ("async_grpo", "--cluster", "h100x16", *APART, *settings, *options)


@cache
def found() -> dict[str, Any]:
    done = hflow(*asked(*BOTH), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_each_has_a_line_and_all_together_one() -> None:
    rows = {row["if"]: row["change_fraction"] for row in found()["sensitivities"]}
    names = ["speculative=3,2.47", "partial-rollouts=1.5", "all of these"]
    assert list(rows) == names and all(change < 0 for change in rows.values())
    assert rows["all of these"] <= min(rows[name] for name in names[:2])


@pytest.mark.slow
def test_the_plan_itself_has_none_of_them() -> None:
    plain = json.loads(hflow(*asked(), "--json").stdout)
    assert "sensitivities" not in plain
    same = "hash", "step_time_s", "nodes"
    assert [plain[key] for key in same] == [found()[key] for key in same]


@pytest.mark.slow
def test_the_table_is_that_of_sensitivities() -> None:
    shown = hflow(*asked("partial-rollouts"), "--sensitivities", "--ascii").stdout
    table = shown[shown.index("if there were") :].split("\n\n")[0].splitlines()
    assert table[-1].startswith("partial-rollouts=2 ") and table[-2].startswith("batch x2")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speculativ", "did you mean `speculative`?"),
        ("", "known: "),
        ("speculative=3,5", "speculative=DRAFTED,MADE"),
        ("speculative=2.5", "speculative=DRAFTED,MADE"),
        ("speculative=inf", "speculative=DRAFTED,MADE"),
        ("speculative=3,2,1", "speculative=DRAFTED,MADE"),
        ("partial-rollouts=1", "above 1"),
        ("partial-rollouts=many", "above 1"),
        ("partial-rollouts", "--set nodes.rollout.lengths.mean=TOKENS"),
    ],
)
def test_what_cannot_be_priced_is_refused(text: str, told: str) -> None:
    with pytest.raises(HflowError) as caught:
        what_ifs([text], hf.load("algorithms/grpo.yaml"))
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF312" and problem.message.startswith(f"--what-if {text}: ")
    assert told in (problem.help or "")


def test_all_that_is_wrong_is_told_before_a_plan_is_made() -> None:
    done = hflow(
        "sft", "--what-if", "speculative", "--what-if", "draft", "--set", "params.model=shape:qwen2.5-72b"
    )
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("error[HF312]") == 2 and "`sft` generates nothing" in done.stderr
