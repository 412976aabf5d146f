"""GRPO of models with experts: every plan gives the trajectory of the one-worker plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import hflow
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tools.new_model import new_model
from tests.runtime.test_plan_never_changes_the_algorithm import GRAPH, digests, losses
from tests.runtime.test_resume import EVERY, up_to

STEPS = 3

PLANS = {
    "one worker": ("rollout=tp1@0", "ref_logprobs=tp1@0", "actor_train=tp1@0"),
    "ep2 -> dp2": ("rollout=dp2@0-1", "ref_logprobs=dp2,ep2@0-1", "actor_train=dp2,ep2@0-1"),
    "ep2 zero1 -> tp2, apart": ("rollout=tp2@2-3", "ref_logprobs=tp1@2", "actor_train=dp2,ep2,zero1@0-1"),
    "ep2 -> dp4 ep4": ("rollout=dp4,ep4@0-3", "ref_logprobs=dp2@0-1", "actor_train=dp2,ep2@0-1"),
    "cp2 ep2 zero1 -> tp2 sp": (
        "rollout=tp2,dp2@0-3", "ref_logprobs=tp2,sp@0-1", "actor_train=dp2,cp2,ep2,zero1@0-3",
    ),
    "tp2 sp ep2 recompute -> cp2": (
        "rollout=dp2@0-1", "ref_logprobs=cp2@0-1", "actor_train=dp2,tp2,sp,ep2,recompute@0-3",
    ),
    "tp2 sp ep4 etp1 -> tp2 etp1": (
        "rollout=dp2,tp2,ep4,etp1@0-3", "ref_logprobs=tp2,ep2,etp1@2-3",
        "actor_train=dp2,tp2,sp,ep4,etp1@0-3",
    ),
    "tp2 ep2 etp1 zero1 -> dp4": (
        "rollout=dp4@0-3", "ref_logprobs=tp1@0", "actor_train=dp2,tp2,ep2,etp1,zero1@0-3",
    ),
    "pp2 ep2 -> tp2": ("rollout=tp2,dp2@0-3", "ref_logprobs=tp2@0-1", "actor_train=pp2,dp2,ep2@0-3"),
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random weights: 2 layers of 32, 4 experts of which a token passes through 2, vocabulary 32."""
    folder = tmp_path / "model"
    new_model(
        folder, family="qwen3_moe", layers=2, hidden=32, heads=4, ffn=32, experts=4,
        alphabet="0123456789+=. ", max_positions=64, seed=3,
    )  # fmt: skip
    return folder


def compiled(model: Path, pins: tuple[str, ...]) -> Plan:
    params = [f"params.model={model}", f"params.steps={STEPS}"]
    graph = hflow.load(GRAPH, [*params, "nodes.actor_train.with.balance_coef=0.1"])
    return hflow.compile(graph, "clusters/local4.yaml", pins)


def test_same_trajectory(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Tokens are equal, losses within 1e-5 of the size of the advantages that cancel in them."""
    runs = {
        name: execute(compiled(model, pins), tmp_path / name, pool=workers, config=EVERY)
        for name, pins in PLANS.items()
    }
    one = runs["one worker"]
    assert len(set(digests(one))) == STEPS and one.metrics[-1]["actor_train.kl"] > 1e-7
    for other in runs.values():
        _compare(one, other)
    # Moments of experts, each split over the replicas that hold it, go on where all are whole.
    for number, name in enumerate(("ep2 zero1 -> tp2, apart", "tp2 ep2 etp1 zero1 -> dp4")):
        stopped = up_to(runs[name].folder, 1, tmp_path / f"stopped{number}")
        resumed = execute(compiled(model, PLANS["ep2 -> dp2"]), stopped, pool=workers, resume=True)
        _compare(one, resumed)


def _compare(one: Run, other: Run) -> None:
    assert digests(other) == digests(one)
    for mine, theirs in zip(losses(other), losses(one)):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    for mine, theirs in zip(other.metrics, one.metrics):
        for name in ("actor_train.grad_norm", "actor_train.expert_balance"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4)
    found, expected = (load_file(run.folder / "export/actor/model.safetensors") for run in (other, one))
    assert found.keys() == expected.keys()
    # Adam's first steps turn rounding noise into up to lr = 1e-3
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 2e-4
