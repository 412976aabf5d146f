"""GRPO of a model with experts whose trained routers follow the sampler's."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.tools.new_model import new_model
from tests.installed import needs_sglang
from tests.runtime.test_plan_never_changes_the_algorithm import GRAPH, digests, losses
from tests.runtime.test_resume import EVERY, up_to

PLANS = (
    ("rollout=tp1@0", "ref_logprobs=tp1@0", "actor_train=tp1@0"),
    ("rollout=tp2,dp2@0-3", "ref_logprobs=tp2@0-1", "actor_train=pp2,dp2,ep2,recompute@0-3"),
    ("rollout=dp2@0-1", "ref_logprobs=tp2,sp@0-1", "actor_train=cp2,tp2,sp@0-3"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    new_model(
        folder, family="qwen3_moe", layers=2, hidden=32, heads=4, ffn=32, experts=4,
        alphabet="0123456789+=. ", max_positions=64, seed=3,
    )  # fmt: skip
    return folder


def test_plans_give_one_trajectory(workers: Pool, model: Path, tmp_path: Path) -> None:
    """And what is trained first has the log-probs that were sampled."""
    routes = [f"nodes.{name}.in.routes=rollout.routes" for name in ("actor_train", "ref_logprobs")]
    graph = hflow.load(GRAPH, [f"params.model={model}", "params.steps=2", *routes])
    one, *others = (
        execute(
            hflow.compile(graph, "clusters/local4.yaml", pins),
            tmp_path / str(number),
            pool=workers,
            config=EVERY,
        )
        for number, pins in enumerate(PLANS)
    )
    for other in others:
        assert digests(one) == digests(other)
        for mine, theirs in zip(losses(other), losses(one), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    for run in (one, *others):
        # float32 sums of some dozen terms of order 1
        assert all(step["actor_train.mismatch"] < 1e-5 for step in run.metrics)


@needs_sglang
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_follows_the_routes_of_a_server(workers: Pool, model: Path, tmp_path: Path) -> None:
    """A server's kernels round otherwise, but no token passes through other experts."""
    graph = hflow.load(
        GRAPH, [f"params.model={model}", "params.steps=2", "nodes.actor_train.in.routes=rollout.routes"]
    )
    pins = "rollout=dp2@0-1", "actor_train=dp2,ep2@0-1"
    plan = hflow.compile(graph, "clusters/local4.yaml", pins, engines=("rollout=sglang",))
    run = execute(plan, tmp_path / "run", pool=workers, export=False)
    assert len({step["digest.rollout"] for step in run.metrics}) == 2
    assert all(0 < step["actor_train.mismatch"] < 1e-4 for step in run.metrics)


def test_rows_that_wait_keep_their_routes(workers: Pool, model: Path, tmp_path: Path) -> None:
    """Through a checkpoint, too: a surplus of a region, which is trained on in a later step."""
    routes = ["nodes.sampling.out.routes=rollout.routes", "nodes.actor_train.in.routes=sampling.routes"]
    graph = hflow.load("tests/runtime/graphs/region.yaml", [f"params.model={model}", "params.age=1", *routes])
    plan = hflow.compile(graph, "clusters/local4.yaml", ("rollout=dp2@0-1", "actor_train=dp2,ep2@0-1"))
    whole = execute(plan, tmp_path / "whole", pool=workers, config=EVERY)
    resumed = execute(plan, up_to(whole.folder, 1, tmp_path / "stopped"), pool=workers, resume=True)
    assert digests(resumed) == digests(whole) and losses(resumed) == losses(whole)
