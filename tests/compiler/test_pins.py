"""Pins: what they fix, and why the impossible ones are refused."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

import hflow
from hflow.compiler.compile import compile_graph
from hflow.compiler.options import PlannerOptions
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from hflow.plan.edges import WeightEdge
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import to_json
from hflow.plan.plan_file import load_plan
from tests.compiler.workloads import large

A100S = load_cluster("a100x8")


@pytest.fixture(scope="module")
def ppo() -> Graph:
    return large("ppo", "llama-7b")


def refusal(graph: Graph, *pins: str) -> Diagnostic:
    with pytest.raises(HflowError) as caught:
        compile_graph(graph, A100S, pins)
    (found,) = caught.value.diagnostics
    assert found.code == "HF302"
    return found


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("actor_train=zero2", "zero2 is none of zero0, zero1, zero3"),
        ("actor_train=zero1,zero0", "`zero` is given twice"),
        ("actor_train=recompute,no-recompute", "`recompute` is given twice"),
        ("actor_train=micro0", "at least 1"),
        ("actor_train=,", "not of the form"),
        ("actor_train=fast", "`fast` is no size"),
        ("values=recompute", "`recompute` is for train nodes, and `values` is a score node"),
        ("rollout=zero1", "`zero` is for train nodes"),
        ("rollout=offload", "reads weights that are trained; pin offload on `actor_train`"),
        ("actor_train=tp8,zero1", "zero1 has nothing to split over dp1"),
        ("actor_train=dp8,ep2", "`actor` has no experts for ep2"),
        ("actor_train=dp8,micro17", "micro17 is more than the 16 rows of a replica"),
        ("actor_train=vpp0", "at least 1"),
        ("values=vpp2", "`vpp` is for train nodes, and `values` is a score node"),
        ("actor_train=pp1,vpp2", "vpp2 has no pipeline stages to interleave in pp1"),
        ("actor_train=pp2,vpp3", "pp2 with vpp3 does not divide 32 layers"),
        ("actor_train=pp2,dp4,vpp2,micro32", "micro32 makes 1 passes, no multiple of pp2 as vpp2 needs"),
        ("reward=tp3", "tp3 neither divides 32 kv heads nor is a multiple of them"),
        ("gae=tp2", "`gae` runs where its values lie"),
        ("critictrain=tp2", "no node `critictrain`; did you mean `critic_train`?"),
    ],
)
def test_impossible_pins_tell_why(ppo: Graph, pin: str, message: str) -> None:
    found = refusal(ppo, pin)
    assert message in f"{found.message}; {found.help}" and f"--pin {pin}" in found.message


def test_no_stage_is_left_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages of two layers between the first and the last, for which one is left."""
    monkeypatch.setitem(NAMED_SHAPES, "llama-7b", replace(NAMED_SHAPES["llama-7b"], num_layers=9))
    found = refusal(large("ppo", "llama-7b"), "reward=pp6,dp1,tp1")
    assert "pp6 would leave stages without any of 9 layers" in found.help


def test_samples_of_a_prompt_stay_together() -> None:
    """GRPO's eight responses to a prompt are generated at once."""
    found = refusal(large("grpo", "llama-7b"), "rollout=dp8,micro12")
    assert "micro12 splits groups of 8 rows" in found.help


def test_experts_divide_and_lie_on_data_parallel_ranks() -> None:
    graph = large("sft", "qwen3-30b-a3b")
    assert "ep3 does not divide 128 experts" in refusal(graph, "actor_train=dp8,ep3").help
    found = refusal(graph, "actor_train=dp2,tp4,ep4").help
    assert found.endswith("ep4 does not divide dp2, but with `etp1` it would do")
    assert refusal(graph, "actor_train=dp8,ep16").help.endswith("ep16 does not divide dp8")


def test_whole_experts_lie_on_all_ranks_of_a_stage() -> None:
    """Megatron's recipes of large models have more parts of the experts than data-parallel ranks."""
    graph = large("sft", "qwen3-30b-a3b")
    plan = compile_graph(graph, load_cluster("a100x16"), ["actor_train=dp4,tp4,ep16,etp1,sp,zero1"])
    strategy = plan.node("actor_train").strategy
    assert (strategy.ep, strategy.whole_experts) == (16, True)
    assert strategy.marks[:3] == ("sp", "ep16", "etp1")
    cut = compile_graph(graph, load_cluster("a100x16"), ["actor_train=dp4,tp4,ep4,etp4,sp,zero1"])
    assert not cut.node("actor_train").strategy.whole_experts
    assert cut.step_time_s > plan.step_time_s, "nothing is gathered around whole experts"
    found = refusal(graph, "actor_train=dp2,tp4,ep2,etp1").help
    assert "ep2 with experts that tp leaves whole: `ep` must be a multiple of tp4 that divides the 8" in found
    assert "etp4 is neither 1 nor tp2" in refusal(graph, "actor_train=dp4,tp2,etp4").help
    assert "`actor` has no experts for etp1" in refusal(large("sft", "llama-7b"), "actor_train=tp2,etp1").help


def test_the_planner_takes_the_best_ep_of_whole_experts() -> None:
    """`etp1` alone leaves `ep` open; on one rank of tp there is nothing to cut."""
    graph, cluster = large("sft", "qwen3-30b-a3b"), load_cluster("a100x16")
    plan = compile_graph(graph, cluster, ["actor_train=dp8,tp2,etp1"])
    each = [compile_graph(graph, cluster, [f"actor_train=dp8,tp2,ep{ep},etp1"]) for ep in (8, 16)]
    assert plan.step_time_s == min(other.step_time_s for other in each)
    assert plan.node("actor_train").strategy.whole_experts
    alone = compile_graph(graph, cluster, ["actor_train=dp16,tp1,etp1"])
    assert not alone.node("actor_train").strategy.whole_experts


def test_experts_are_shared_where_the_engine_can() -> None:
    graph = large("grpo", "qwen3-30b-a3b")
    pins = ["actor_train=dp8,tp2,ep8,zero1", "rollout=dp16,ep4"]
    plan = compile_graph(graph, load_cluster("a100x16"), pins)
    assert plan.node("actor_train").strategy.ep == 8 and plan.node("rollout").strategy.ep == 4
    served = PlannerOptions(engines=("rollout=sglang",))
    with pytest.raises(HflowError, match="SGLang shares no experts between replicas that generate"):
        compile_graph(graph, load_cluster("a100x16"), pins[1:], served)


def test_what_cannot_wait_in_the_hosts_memory_is_not_offloaded(ppo: Graph) -> None:
    refreshed = large("iterative_grpo", "llama-7b")
    assert "`ref` takes over the weights of `actor`" in refusal(refreshed, "ref_logprobs=offload").message
    with pytest.raises(HflowError, match="HF302.*no link to the host's memory"):
        compile_graph(ppo, replace(A100S, host_link=None), ["reward=offload"])


def test_pins_of_one_models_trainings_agree() -> None:
    path = "shape:llama-7b"
    graph = hflow.load("tests/runtime/graphs/trained_twice.yaml", [f"models.actor.path={path}"])
    found = refusal(graph, "first=dp2,zero0", "again=zero1")
    assert "the pins disagree about zero" in found.help


def test_pins_are_kept(ppo: Graph) -> None:
    pins = (
        "actor_train=pp2,dp4,zero1,recompute,micro4,offload",
        "values=micro4,no-offload",
        "reward=dp8,offload",
    )
    plan = compile_graph(ppo, A100S, pins)
    train, values, reward = map(plan.node, ("actor_train", "values", "reward"))
    assert (train.strategy.zero, train.strategy.recompute, train.micro_batch, train.offload) == (
        1,
        "full",
        4,
        True,
    )
    assert str(train.mesh) == "pp2 dp4 @0-7" and reward.offload and not values.offload
    assert values.micro_batch == 4
    ops = [i.op for i in plan.step.instructions if i.node == "actor_train"]
    assert [op for op in ops if op in ("onload", "call", "offload")] == ["onload", "call", "offload"]


def test_interleaved_stages_are_pinned(ppo: Graph, tmp_path: Path) -> None:
    """The trainer has chunks of layers, and passes in multiples of pp; the actor's other nodes have not, so
    weights move to them. Nothing of it is in plans without."""
    plain = compile_graph(ppo, A100S, ["actor_train=pp4,dp2"])
    plan = compile_graph(ppo, A100S, ["actor_train=pp4,dp2,vpp2"])
    own = plan.node("actor_train")
    rows = ppo.node("actor_train").repeat
    assert own.strategy.vpp == 2 and own.strategy.marks[0] == "vpp2" and rows and rows.minibatch
    assert ceil(rows.minibatch / 2 / own.micro_batch) % 4 == 0
    edges = [e for e in plan.step.edges if isinstance(e, WeightEdge) and e.source == "actor_train"]
    assert edges and all((e.source_sharding.vpp, e.target_sharding.vpp) == (2, 1) for e in edges)
    assert "vpp" in to_json(plan) and "vpp" not in to_json(plain)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").hash == plan.hash
