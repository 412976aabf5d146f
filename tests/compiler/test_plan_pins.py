"""A plan's own pins make it again."""

from __future__ import annotations

import pytest

import hflow
from hflow.compiler.plan_pins import pins_of
from tests.compiler.workloads import ALGORITHMS, large


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"safe_rlhf"}))
@pytest.mark.parametrize("cluster", ["a100x16", "h100x16"])
def test_a_plans_own_pins_make_it_again(algorithm: str, cluster: str) -> None:
    graph = large(algorithm, "llama-7b")
    plan = hflow.compile(graph, cluster)
    again = hflow.compile(graph, cluster, pins_of(plan))
    assert again.nodes == plan.nodes and again.step_time_s == plan.step_time_s


def test_whole_experts_are_pins_too() -> None:
    pins = ("actor_train=pp2,tp2,dp4,ep8,etp1,zero1", "rollout=tp2,dp8,ep4,etp1", "ref_logprobs=tp2,dp8,ep8")
    graph = large("grpo", "qwen3-30b-a3b")
    plan = hflow.compile(graph, "h100x16", pins)
    assert hflow.compile(graph, "h100x16", pins_of(plan)).nodes == plan.nodes


def test_strategies_are_pins_too() -> None:
    pins = ("actor_train=pp2,tp2,dp4,vpp2,zero1,recompute,sp", "rollout=tp4,dp4", "ref_logprobs=tp2,dp8,sp")
    plan = hflow.compile(large("grpo", "llama-7b"), "a100x16", pins)
    assert hflow.compile(large("grpo", "llama-7b"), "a100x16", pins_of(plan)).nodes == plan.nodes
    assert "actor_train=pp2,dp4,tp2,ep1," in pins_of(plan)[-1] and pins_of(plan)[-1].endswith("@0-15")
