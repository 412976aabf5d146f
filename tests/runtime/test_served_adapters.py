"""Rollouts of a model with an adapter by the real SGLang: it has the base, and only A and B move to it."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.plan.frozen import moved_parameters
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.installed import needs_sglang
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_bytes import measured, weight_edges, weights_of
from tests.runtime.test_resume import EVERY, up_to
from tests.runtime.test_sglang import AGREE, STEPS
from tests.runtime.test_sglang import model as model  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_sglang]


def planned(model: Path, pins: tuple[str, ...], *more: str) -> Plan:
    """In each step the actor also answers greedily, on SGLang and on Megatron. Without dropout, so that
    log-probs before the first update are those of the sampled tokens."""
    overrides = [f"params.model={model}", "models.actor.adapter.dropout=0", *more]
    graph = hflow.load(GRAPHS / "adapted.yaml", overrides, [GRAPHS / "greedy_twice.yaml"])
    plan = hflow.compile(graph, "local4", pins, engines=("rollout=sglang", "greedy=sglang"))
    assert [n.node for n in plan.nodes if n.engine == "sglang"] == ["rollout", "greedy"]
    assert plan.graph.node("ref_logprobs").model_use.base
    return plan


def check(plan: Plan, run: Run) -> None:
    """It learned in every step, SGLang had the newest adapter in each, and nothing else was sent."""
    assert len({line["digest.greedy"] for line in run.metrics}) == STEPS
    for line in run.metrics:
        assert line["digest.greedy"] == line["digest.greedy_again"]
        assert 0 < line["actor_train.mismatch"] < AGREE
    assert run.metrics[-1]["actor_train.kl"] > 1e-6, "the base is not what was trained"
    adapter = sum(parameter.size for parameter in moved_parameters(plan.shapes["actor"]))
    assert {edge.size_bytes for edge in weight_edges(plan)} == {4 * adapter}
    assert measured(run, "weights", "bytes") == weights_of(plan)


@pytest.mark.rotating(6)
def test_a_server_over_two_ranks_elsewhere(workers: Pool, model: Path, tmp_path: Path) -> None:
    plan = planned(model, ("actor_train=dp2@0-1", "rollout=tp2@2-3"))
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    check(plan, run)


@pytest.mark.acceptance
def test_two_servers_beside_the_trainer(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Each has a base of its own, in the trainer's layout too."""
    plan = planned(model, ("actor_train=dp2@0-1", "rollout=dp2@0-1"))
    check(plan, execute(plan, tmp_path / "run", pool=workers, export=False))


@pytest.mark.acceptance
def test_checkpoints_have_the_older_adapter(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Of a server that lags, from where a run goes on as if nothing had happened."""
    older = [f"nodes.{name}.model={{use: actor, lag: 1}}" for name in ("greedy", "greedy_again")]
    plan = planned(model, ("actor_train=tp1@0", "rollout=tp1@1"), "params.lag=1", *older)
    run = execute(plan, tmp_path / "run", pool=workers, export=False, config=EVERY)
    assert [line["actor_train.staleness"] for line in run.metrics] == [0, 1, 1]
    for line in run.metrics:
        assert line["digest.greedy"] == line["digest.greedy_again"]
    resumed = execute(
        plan, up_to(run.folder, 2, tmp_path / "2"), pool=workers, export=False, config=EVERY, resume=True
    )
    assert [m["digest.rollout"] for m in resumed.metrics] == [m["digest.rollout"] for m in run.metrics]


@pytest.mark.acceptance
def test_an_adapter_reaches_rollouts_in_flight(workers: Pool, model: Path, tmp_path: Path) -> None:
    adapter = "models.actor.adapter={rank: 4, alpha: 16}"
    steps = 6
    overrides = [f"params.model={model}", f"params.steps={steps}", adapter]
    graph = hflow.load(GRAPHS / "in_flight.yaml", overrides)
    pins = "rollout=tp2@1-2", "actor_train=tp1@0", "scored=tp1@0"
    plan = hflow.compile(graph, "local4", pins, engines=["rollout=sglang"])
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    for step, line in enumerate(run.metrics):
        share = line["rollout.renewed_tokens"]
        assert line["difference.newest"] == (step if share > 0 else max(0, step - 1))
        assert share == 0 or line["difference.newer"] < AGREE
    assert any(0 < line["rollout.renewed_tokens"] < 1 for line in run.metrics)
