"""Rollouts by transformers in runs with real workers: the same trajectory as on Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.plan.program import Release, SyncWeights
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.matrix import GRAPHS

STEPS = 2
PINS = {
    "the trainer's devices": ("actor_train=tp2@0-1", "rollout=dp2@0-1"),
    "elsewhere": ("actor_train=tp2@0-1", "rollout=dp2@2-3"),
}


def planned(model: Path, pins: tuple[str, ...], engine: str) -> hflow.Plan:
    graph = hflow.load(GRAPHS / "grpo_tiny.yaml", [f"params.model={model}", f"params.steps={STEPS}"])
    return hflow.compile(graph, load_cluster("local4"), pins, engines=(f"rollout={engine}",))


@pytest.mark.slow
@pytest.mark.parametrize("pins", PINS.values(), ids=PINS.keys())
def test_a_run_has_the_tokens_of_megatrons(
    workers: Pool, tiny_model: Path, tmp_path: Path, pins: tuple[str, ...]
) -> None:
    """Weights change their layout on the way, from halves to whole ones."""
    runs: dict[str, Run] = {}
    for engine in ("megatron", "transformers"):
        plan = planned(tiny_model, pins, engine)
        assert plan.node("rollout").engine == engine
        assert any(edge.kind == "weights" and edge.target == "rollout" for edge in plan.step.edges)
        runs[engine] = execute(plan, tmp_path / engine, pool=workers, export=False)
    mine, theirs = runs["transformers"].metrics, runs["megatron"].metrics
    assert len({line["digest.rollout"] for line in theirs}) == STEPS
    assert [line["digest.rollout"] for line in mine] == [line["digest.rollout"] for line in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss.actor_train"] == pytest.approx(other["loss.actor_train"], rel=1e-5, abs=1e-7)
        assert one["actor_train.grad_norm"] == pytest.approx(other["actor_train.grad_norm"], rel=1e-4)
        assert one["actor_train.staleness"] == 0


def test_it_has_weights_of_its_own_on_the_trainers_devices(tiny_model: Path) -> None:
    plan = planned(tiny_model, ("actor_train=dp2@0-1", "rollout=dp2@0-1"), "transformers")
    assert [i.node for i in plan.step.instructions if isinstance(i, Release)] == ["rollout"]
    assert not any(isinstance(i, SyncWeights) and i.donates for i in plan.step.instructions)


def test_a_model_is_not_split(tiny_model: Path) -> None:
    with pytest.raises(HflowError, match="transformers does not split a model over tp2"):
        planned(tiny_model, ("rollout=tp2@0-1",), "transformers")
    assert planned(tiny_model, (), "transformers").node("rollout").mesh.tp == 1
