"""A plan for CPUs on a machine with GPUs: the plan says where models are, not what torch sees.

There need be no GPU: torch is told to say that there is one. Whatever then goes to CUDA fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.gpus import gpus_hidden

pytestmark = pytest.mark.slow
GRAPH = Path(__file__).parent / "grpo_small.yaml"
SEES_NONE = f"{Path(__file__).parent / 'rewards.py'}:digits_without_gpus"

IN_PYTHON = """
import sys, torch
from pathlib import Path
torch.cuda.is_available = lambda: True
import hflow
model, folder = sys.argv[1:]
graph = hflow.load("tests/runtime/grpo_small.yaml", [f"params.model={model}", "params.steps=1"])
run = hflow.execute(hflow.compile(graph, "local1"), run_dir=Path(folder), workers="inline", export=False)
print(run.metrics[0]["actor_train.grad_norm"])
"""

ON_THE_COMMAND_LINE = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch sees", repr(os.environ["CUDA_VISIBLE_DEVICES"]))

sys.meta_path.insert(0, Watch())
from hflow.cli.app import main
sys.argv[0] = "hflow"
main()
"""


def program(text: str, *arguments: str) -> str:
    """What a Python program prints, on a machine with a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rotating(6)
def test_in_a_program_that_has_imported_torch(tiny_model: Path, tmp_path: Path) -> None:
    assert float(program(IN_PYTHON, str(tiny_model), str(tmp_path / "run"))) > 0


@pytest.mark.rotating(6)
def test_the_command_line_hides_them_before_torch_is_imported(tiny_model: Path, tmp_path: Path) -> None:
    settings = ("--set", f"params.model={tiny_model}", "--set", "params.steps=1")
    where = ("--cluster", "local1", "--workers", "inline", "--run-dir", str(tmp_path / "run"))
    told = program(ON_THE_COMMAND_LINE, "exec", str(GRAPH), *settings, *where)
    assert told.splitlines()[0] == "torch sees ''"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_workers_see_none(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """And this process sees what it saw."""
    settings = [f"params.model={tiny_model}", "params.steps=1", f"nodes.reward.fn={SEES_NONE}"]
    plan = hflow.compile(hflow.load(GRAPH, settings), "local")
    run = hflow.execute(plan, run_dir=tmp_path / "run", pool=workers, export=False)
    assert len(run.metrics) == 1
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""


@pytest.mark.parametrize("before", [None, "", "2,3"])
def test_they_are_hidden_for_a_while(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with gpus_hidden():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
