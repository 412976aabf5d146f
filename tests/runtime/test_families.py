"""GRPO of every family: every plan gives the trajectory of the one-worker plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.tools.new_model import new_model
from tests.runtime.test_plan_never_changes_the_algorithm import GRAPH, PLANS, digests, losses

STEPS = 2
DENSE = ("llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3_text")  # qwen2 is elsewhere
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
LAYOUTS = ("dp2", "tp2", "pp2", "cp2", "cp2 tp2 sp -> tp2")
TIED = ("gemma2", "gemma3_text")
EP2 = {"ep2": ("rollout=dp2,ep2@0-1", "ref_logprobs=dp2,ep2@0-1", "actor_train=dp2,ep2@0-1")}


@pytest.mark.matrix(cover=False)
@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_same_trajectory(family: str, workers: Pool, tmp_path: Path) -> None:
    """Tokens are equal, losses within 1e-5 of the size of the advantages that cancel in them."""
    model = tmp_path / "model"
    new_model(
        model, family=family, layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, alphabet="0123456789+=. ",
        max_positions=64, seed=3, tied=family in TIED, experts=4 if family in EXPERTS else None,
    )  # fmt: skip
    plans = {name: PLANS[name] for name in ("one worker", *LAYOUTS)}
    plans |= EP2 if family in EXPERTS else {}
    runs = {
        name: execute(compiled(model, pins), tmp_path / name, pool=workers, export=False)
        for name, pins in plans.items()
    }
    one = runs.pop("one worker")
    assert len(set(digests(one))) == STEPS and one.metrics[-1]["actor_train.kl"] > 1e-8
    for name, other in runs.items():
        assert digests(other) == digests(one), name
        for mine, theirs in zip(losses(other), losses(one)):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7), name


def compiled(model: Path, pins: tuple[str, ...]) -> Plan:
    graph = hflow.load(GRAPH, [f"params.model={model}", f"params.steps={STEPS}"])
    return hflow.compile(graph, "clusters/local4.yaml", pins)
