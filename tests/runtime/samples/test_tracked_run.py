"""A run with a tracker: what it shows is what metrics.jsonl holds, also where the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.report.trackers import registry
from hflow.runtime.controller.former_run import read_lines
from hflow.runtime.execute import execute

GRPO = "tests/runtime/grpo_small.yaml"
CONFIG = RunConfig(CheckpointPolicy(every=1, keep=9), export="none", trackers=("tensorboard",))


@pytest.mark.slow
def test_a_run_that_goes_on_shows_each_step_once(tiny_model: Path, tmp_path: Path) -> None:
    """Times tell which attempt made a step: those in TensorBoard are those of the last."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run = tmp_path / "run"
    plan = hflow.compile(hflow.load(GRPO, [f"params.model={tiny_model}", "params.steps=3"]), "local1")
    hflow.execute(plan, run_dir=run, workers="inline", config=CONFIG)
    (run / "checkpoints/step-00000003/manifest.json").unlink()
    before = [line["time_s.rollout"] for line in read_lines(run / "metrics.jsonl")]
    hflow.execute(plan, run_dir=run, workers="inline", config=CONFIG, resume=True)
    lines = list(read_lines(run / "metrics.jsonl"))
    assert lines[2]["time_s.rollout"] != before[2] and lines[1]["time_s.rollout"] == before[1]

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    tags = read.Tags()["tensors"]
    for name, tag in (("reward_mean", "reward_mean"), ("time_s.rollout", "time_s/rollout")):
        found = [(event.step, float(make_ndarray(event.tensor_proto))) for event in read.Tensors(tag)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines]
    numbers = {n.replace(".", "/", 1) for n, v in lines[0].items() if isinstance(v, float | int)} - {"step"}
    assert numbers <= set(tags)
    assert [event.step for event in read.Tensors("eval/reward.score")] == [0, 3]
    assert [event.step for event in read.Tensors("samples/text_summary")] == [0, 2]
    assert not (run / "now.json").exists()
    assert json.loads((run / "summary.json").read_text())["samples"] == 2


def test_a_missing_tracker_is_told_before_there_is_a_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    plan = hflow.compile(hflow.load(GRPO, [f"params.model={tiny_model}"]), "local1")
    with pytest.raises(HflowError, match=r"(?s)HF404.*not installed.*pip install -e '\.\[tensorboard\]'"):
        hflow.execute(plan, run_dir=tmp_path / "run", workers="inline", config=CONFIG)
    with pytest.raises(HflowError, match="HF404"):  # without views there are no trackers
        execute(plan, tmp_path / "run", workers="inline", config=CONFIG)
    assert not (tmp_path / "run").exists()
