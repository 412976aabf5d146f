"""A model with an adapter, from graph file to export: every plan samples and drops the same, and only A and B
move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import hflow
from hflow.graph.ir import Graph
from hflow.plan.frozen import moved_parameters
from hflow.plan.plan import Plan
from hflow.report.export_run import export_run
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.engines.models import load_hf
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_bytes import measured, weight_edges, weights_of
from tests.runtime.test_plan_never_changes_the_algorithm import PLANS, digests, losses
from tests.runtime.test_resume import EVERY

LAYOUTS = {
    name: PLANS[name]
    for name in ("one worker", "pp2", "tp2 dp2 -> tp1", "cp2 tp2 sp -> tp2", "tp1 -> tp2, apart")
}
LAYOUTS["zero1"] = ("rollout=dp2@0-1", "ref_logprobs=dp2@0-1", "actor_train=dp2,zero1@0-1")


def graph_of(model: Path, *more: str) -> Graph:
    return hflow.load(GRAPHS / "adapted.yaml", [f"params.model={model}", *more])


@pytest.fixture(scope="module")
def plans(tiny_model: Path) -> dict[str, Plan]:
    return {name: hflow.compile(graph_of(tiny_model), "local4", pins) for name, pins in LAYOUTS.items()}


@pytest.fixture(scope="module")
def runs(workers: Pool, plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder, found = tmp_path_factory.mktemp("adapted"), dict[str, Run]()
    for name, plan in plans.items():
        exports = name in ("tp2 dp2 -> tp1", "zero1")
        where = folder / name.replace(" ", "_")
        found[name] = execute(plan, where, pool=workers, config=EVERY, export=exports)
    return found


def test_every_plan_samples_and_learns_the_same(runs: dict[str, Run]) -> None:
    one = runs["one worker"]
    assert len(set(digests(one))) == len(one.metrics) and one.metrics[-1]["actor_train.kl"] > 1e-6
    for name, other in runs.items():
        assert digests(other) == digests(one), name
        assert losses(other) == pytest.approx(losses(one), rel=1e-5, abs=1e-7), name
        for mine, theirs in zip(other.metrics, one.metrics):
            norm = theirs["actor_train.grad_norm"]
            assert mine["actor_train.grad_norm"] == pytest.approx(norm, rel=1e-4), name


def test_only_the_adapter_moves(plans: dict[str, Plan], runs: dict[str, Run]) -> None:
    """To the rollout's devices; the reference, which is the base, gets nothing wherever it is."""
    for name, plan in plans.items():
        assert measured(runs[name], "weights", "bytes") == weights_of(plan), name
        edges = weight_edges(plan)
        assert {edge.target for edge in edges} <= {"rollout"}, name
        adapter = sum(p.size for p in moved_parameters(plan.shapes["actor"]))
        assert all(edge.size_bytes == 4 * adapter for edge in edges), name
    apart = weight_edges(plans["tp1 -> tp2, apart"])
    assert [edge.bytes_per_device for edge in apart] != [0], "nothing has moved"


def test_the_base_is_held_once_where_layouts_agree(plans: dict[str, Plan]) -> None:
    plan = plans["one worker"]
    assert [model.name for model in plan.graph.models] == ["actor"]
    parts = [part for memory in plan.memory for part in memory.parts]
    assert len([part for part in parts if "weights" in part]) == 1, parts


def test_checkpoints_hold_the_adapter_alone(runs: dict[str, Run]) -> None:
    run = runs["zero1"]
    manifest = json.loads(next((run.folder / "checkpoints").glob("*/manifest.json")).read_text())
    names = [name for name in manifest["tensors"] if name.startswith("models/actor/weights/")]
    assert names and all(".lora_" in name for name in names)


def test_the_export_is_a_merged_model_and_an_adapter(runs: dict[str, Run], tiny_model: Path) -> None:
    run, tokens = runs["tp2 dp2 -> tp1"], torch.tensor([[3, 7, 4, 5, 9]])
    merged, base = run.folder / "export" / "actor", load_hf(str(tiny_model))
    with torch.no_grad():
        wanted, plain = load_hf(str(merged))(tokens).logits, base(tokens).logits
        found = PeftModel.from_pretrained(base, merged / "adapter")(tokens).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (wanted - plain).abs().max() > 1e-3


def test_an_export_from_a_checkpoint_is_that_of_the_run(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["zero1"]
    export_run(str(run.folder), tmp_path, None, tmp_path / "again", lambda _: None)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(tmp_path / "again" / file), load_file(run.folder / "export/actor" / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file


def test_a_reader_that_lags_has_an_older_adapter(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    graph = graph_of(tiny_model, "params.lag=1")
    plans = [hflow.compile(graph, "local4", PLANS[name]) for name in ("one worker", "tp1 -> tp2, apart")]
    one, apart = (execute(p, tmp_path / str(i), pool=workers, export=False) for i, p in enumerate(plans))
    assert digests(apart) == digests(one)
    assert len(set(digests(one))) == len(one.metrics)
