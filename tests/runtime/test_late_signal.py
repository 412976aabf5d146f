"""A signal that comes when no more steps are to be asked for still leaves a checkpoint of them all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError, Terminated
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.runtime.execute import execute
from hflow.runtime.worker import worker
from hflow.runtime.worker.export import export_model
from tests.runtime.test_resume import GRAPHS

FUNCTION = """
import os, signal
from hflow.ops.op import op

calls = 0

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text, answer):
    global calls
    calls += 1
    if calls == 4:  # of the evaluation at the end: before it came one at the start, and two steps
        os.kill(os.getpid(), signal.SIGTERM)
    return [[float(len(t)) for t in samples] for samples in text]
"""


@pytest.mark.slow
def test_in_the_last_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTION)
    file = tmp_path / "graph.yaml"
    file.write_text((GRAPHS.parent / "grpo_small.yaml").read_text())
    plan = hflow.compile(hflow.load(file, [f"params.model={tiny_model}", "params.steps=2"]), "local1")
    run = tmp_path / "run"
    with pytest.raises(Terminated):
        execute(plan, run, workers="inline")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    resumed = execute(plan, run, workers="inline", resume=True)
    assert resumed.status == "finished" and len(resumed.metrics) == 2
    assert (run / "export" / "actor").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "is_written"), [(1, True), (2, False)])
def test_in_the_export(
    signals: int, is_written: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lets it end: without checkpoints all steps would be lost. The second does not."""

    def interrupted(*arguments: Any) -> None:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        export_model(*arguments)

    monkeypatch.setattr(worker, "export_model", interrupted)
    graph = hflow.load(GRAPHS.parent / "grpo_small.yaml", [f"params.model={tiny_model}", "params.steps=1"])
    run = tmp_path / "run"
    with pytest.raises(Terminated):
        execute(hflow.compile(graph, "local1"), run, workers="inline")
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert (run / "export" / "actor" / "model.safetensors").is_file() == is_written


@pytest.mark.slow
def test_a_plan_that_cannot_be_loaded_takes_the_place_of_none(tiny_model: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", GRAPHS.parent / "grpo_small.yaml"
    short, long = (hflow.load(file, [f"params.model={tiny_model}", f"params.steps={n}"]) for n in (1, 2))
    config = RunConfig(CheckpointPolicy(every=1))
    execute(hflow.compile(short, "local1"), run, workers="inline", export=False, config=config)
    before = (run / "plan.json").read_bytes()
    with pytest.raises(HflowError, match="inline workers are for plans of one"):
        execute(hflow.compile(long, "local4"), run, workers="inline", export=False, resume=True)
    assert (run / "plan.json").read_bytes() == before
    execute(hflow.compile(long, "local1"), run, workers="inline", export=False, resume=True)
    assert (run / "plan.json").read_bytes() != before
