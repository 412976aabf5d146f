"""What users' functions write reaches the terminal and the run folder, from workers under Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hflow.runtime.controller.workers_log import SHOWN, WorkersLog

GRAPH = """\
hflow: 1
extends: algorithms/grpo.yaml
name: talkative
params: {batch: 4, group: 2, minibatch: 8, steps: 2, holdout: 0, max_new_tokens: 2}
eval: null
nodes:
  reward: {fn: "FILE:talks"}
"""
FUNCTION = """\
import logging

import torch
from hflow.ops.op import op

print("imported")

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def talks(text, answer):
    print(f"{len(text)} groups")
    logging.warning("for %d answers", len(answer))
    return torch.zeros(len(text), len(text[0]))
"""


def test_lines_have_step_node_and_rank(tmp_path: Path) -> None:
    said: list[str] = []
    lines = [("reward", f"line {n}") for n in range(7)]
    reports = [
        {"output": {"rank": 0, "lines": lines, "left_out": 3}},
        {},
        {"output": {"rank": 2, "lines": [("", "\x1b[31mred")], "left_out": 0}},
    ]
    log = WorkersLog(tmp_path, said.append)
    log.add(4, [{}])
    assert not said and not (tmp_path / "workers.log").exists()
    log.add(4, reports)
    written = (tmp_path / "workers.log").read_text().splitlines()
    assert written[0] == "step 5  reward on rank 0: line 0" and len(written) == 9
    assert written[7] == "step 5  rank 0: 3 more lines, which were not kept"
    assert written[8] == "step 5  import on rank 2: \\x1b[31mred"
    assert said == [f"reward on rank 0: line {n}" for n in range(SHOWN)] + [
        f"… 4 more in {tmp_path}/workers.log"
    ]


def test_a_disk_that_is_full_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    report = {"output": {"rank": 0, "lines": [("reward", "x")], "left_out": 0}}
    WorkersLog(tmp_path / "gone", said.append).add(0, [report])
    assert said == ["reward on rank 0: x"]


@pytest.mark.slow
def test_a_run_shows_what_its_reward_prints(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "talks.py").write_text(FUNCTION)
    graph = Path("talkative.yaml")
    (tmp_path / graph).write_text(GRAPH.replace("FILE", str(tmp_path / "talks.py")))
    (tmp_path / "algorithms").symlink_to(Path("algorithms").resolve())
    settings = ["--set", f"params.model={tiny_model}", "--cluster", "local1", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "hflow.cli.app", "exec", str(graph), *settings],
        cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/workers.log").read_text().splitlines()
    assert "step 1  reward on rank 0: 4 groups" in lines and "step 2  reward on rank 0: 4 groups" in lines
    assert "step 1  reward on rank 0: WARNING:root:for 4 answers" in lines
    assert any(line.endswith("imported") for line in lines)
    assert "reward on rank 0: 4 groups" in done.stderr
