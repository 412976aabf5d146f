"""Which forward passes may be shared, when a plan shares them, and what that costs and saves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.compiler.compile import new_draft
from hflow.compiler.explain.own_forward import own_forward
from hflow.compiler.plan_pins import pins_of
from hflow.compiler.shared_forward import planned_sharing
from hflow.compiler.state import Draft, NoneShorter
from hflow.cost.compute import node_time_s
from hflow.cost.instances import kept_activations
from hflow.cost.working_memory import working_bytes
from hflow.diagnostics import HflowError
from hflow.graph.adapter import Adapter
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan, Search
from hflow.plan.read_shape import named_shape
from hflow.plan.shared_forward import refusal, sharing
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.verify.placement_consistency import misplaced
from hflow.plan.workload import workload
from hflow.view.terminal.remarks import remarks

PPO = Path("algorithms/ppo.yaml")
SHAPE = "qwen2.5-0.5b"
NAMED = [f"params.model=shape:{SHAPE}", f"params.reward_model=shape:{SHAPE}", "params.max_new_tokens=256"]
WHOLE = [*NAMED, "params.minibatch=128"]  # one update of all rows
LARGE = ["params.model=shape:qwen2.5-7b", "params.reward_model=shape:qwen2.5-7b", "params.max_new_tokens=512"]
SHARES = Strategy(share_forward=True)
AGAIN = "  again: {op: score, model: critic, in: {tokens: rollout.tokens}}\n"
OTHER = "  other: {op: generate, model: actor, in: {prompt: prompts.tokens}, with: {max_new_tokens: 4}}\n"
OF_OTHER = f"{OTHER}  again: {{op: score, model: critic, in: {{tokens: other.tokens}}}}\n"
TWICE = """  more: {op: train, model: critic, loss: hflow.ops.values.value_clip, with: {lr: 1e-3},
         in: {tokens: rollout.tokens, old_values: values.values, returns: gae.returns}, after: [critic_train]}
"""


def ppo(tmp_path: Path, more: str = "", waits: str = "", overrides: Iterable[str] = NAMED) -> Graph:
    """`more`: nodes; `waits`: those that `critic_train` comes after."""
    text = PPO.read_text()
    head, tail = text.split("  critic_train:\n")
    tail = f"  critic_train:\n    after: [{waits}]\n{tail}" if waits else f"  critic_train:\n{tail}"
    path = tmp_path / "ppo.yaml"
    path.write_text(head + more + tail)
    return hflow.load(path, overrides)


def why_not(graph: Graph, node: str = "again", **changes: Any) -> str:
    shape = replace(named_shape(SHAPE).with_head("scalar"), **changes)
    return refusal(graph, shape, graph.node(node), graph.node("critic_train"))


@pytest.mark.parametrize(
    ("algorithm", "pairs"),
    [
        ("ppo", {"values": "critic_train"}),
        ("safe_rlhf", {"values": "critic_train", "cost_values": "cost_critic_train"}),
        ("async_grpo", {"actor_logprobs": "actor_train"}),
        ("reward_model", {}),
        ("grpo", {}),
    ],
)
def test_pairs_of_the_algorithms(algorithm: str, pairs: dict[str, str]) -> None:
    graph = hflow.load(f"algorithms/{algorithm}.yaml")
    assert sharing(graph, {m.name: named_shape(SHAPE).with_head(m.head) for m in graph.models}) == pairs


def test_why_forward_passes_are_not_shared(tmp_path: Path) -> None:
    assert why_not(ppo(tmp_path), "values") == ""
    assert why_not(ppo(tmp_path, AGAIN), "again") == "`critic_train` does not wait for `again`"
    assert why_not(ppo(tmp_path, OF_OTHER, "again")) == "they read other rows"
    assert why_not(ppo(tmp_path, AGAIN, "again")) == "other nodes may use `critic` between them"
    assert why_not(ppo(tmp_path, TWICE), "values") == "several nodes train `critic`"
    older = AGAIN.replace("model: critic", "model: {use: critic, lag: 1}")
    assert why_not(ppo(tmp_path, older, "again")) == "`again` scores with other weights"
    of_adapter = Adapter(rank=4, alpha=8, targets=("q_proj",), dropout=0.1)
    assert why_not(ppo(tmp_path), "values", adapter=of_adapter) == "training drops inputs of the adapter"
    experts = named_shape("qwen3-30b-a3b").moe
    assert why_not(ppo(tmp_path), "values", moe=experts).startswith("training counts and balances")


def test_nodes_in_rounds_share_nothing() -> None:
    graph = hflow.load("tests/runtime/graphs/region_scored.yaml", [f"params.model=shape:{SHAPE}"])
    (score,) = (n for n in graph.nodes if n.op == "score" and graph.trainers(n.model_use.model))
    reason = refusal(graph, named_shape(SHAPE), score, graph.trainers(score.model_use.model)[0])
    assert reason == "they are in rounds of `sampling`"


def compiled(overrides: Iterable[str], cluster: str = "h100x1", **options: Any) -> Plan:
    return hflow.compile(hflow.load(PPO, overrides), cluster, **options)


def marks(plan: Plan) -> dict[str, bool]:
    return {node.node: node.strategy.share_forward for node in plan.nodes if node.strategy.share_forward}


def test_one_device_saves_one_pass_and_keeps_its_activations() -> None:
    """What the step is shorter by is the forward pass through the layers; what the device holds more is what
    the plan says is kept."""
    shared = compiled(WHOLE)
    plain = compiled(WHOLE, planner="exhaustive")
    assert marks(shared) == {"values": True, "critic_train": True} and not marks(plain)
    assert shared.search.gap == 0.0 and shared.search.tried_sharing
    assert shared.search.tried_sharing.step_time_s == shared.step_time_s
    saved = plain.step_time_s - shared.step_time_s
    assert saved == pytest.approx(plain.node("values").time_s, rel=0.1)  # which has a head, too
    trainer = shared.node("critic_train")
    kept = kept_activations(shared.graph, shared.shapes, trainer)
    more = shared.memory[0].parts["critic weights, gradients, Adam, activations (dp1 @0)"]
    assert more - plain.memory[0].parts["critic weights, gradients, Adam (dp1 @0)"] == kept
    assert "have one pass" in dict(remarks(shared))["forward"]


def test_the_first_of_several_updates_alone_is_shared() -> None:
    graph = hflow.load(PPO, [*NAMED, "nodes.critic_train.repeat.epochs=2"])  # 2 epochs of 2 updates
    work, mesh, shape = (
        workload(graph.node("critic_train")),
        Mesh.of((0,)),
        named_shape(SHAPE).with_head("scalar"),
    )
    how = shape, "bf16", work, mesh, 32
    cluster = compiled(NAMED).cluster
    plain, shared = (node_time_s("train", *how, cluster, strategy) for strategy in (PLAIN, SHARES))
    assert work.optimizer_steps == 4
    passes = node_time_s("train", *how, cluster, Strategy("full")) - plain  # one forward pass of each update
    assert plain - shared == pytest.approx(passes / 4, rel=1e-6)


def test_training_needs_less_beside_what_is_kept() -> None:
    """All rows of an update in one micro-batch: what is kept and what the training needs beside it are, but
    for what the head reads, what it needs in all."""
    graph = hflow.load(PPO, WHOLE)
    work, mesh, shape = (
        workload(graph.node("critic_train")),
        Mesh.of((0,)),
        named_shape(SHAPE).with_head("scalar"),
    )
    plain, shared = (working_bytes("train", shape, "bf16", work, mesh, 128, s) for s in (PLAIN, SHARES))
    few = working_bytes("train", shape, "bf16", work, mesh, 1, PLAIN)
    assert 0 < shared < plain / 5
    assert few < plain / 100


def test_what_memory_does_not_hold_is_not_shared(tmp_path: Path) -> None:
    long = [*WHOLE, "params.max_new_tokens=8192", "params.batch=1024", "params.minibatch=1024"]
    plan = compiled(long)
    assert not marks(plan) or plan.node("critic_train").strategy.recompute == "full"
    lean = compiled(long, pins=["critic_train=no-recompute"])
    assert not marks(lean)
    assert own_forward(lean, "values").endswith("GB")


@pytest.mark.parametrize(
    ("overrides", "cluster", "planner", "told"),
    [
        (NAMED, "h100x1", "hybridflow", "--planner exact tries it"),
        (LARGE, "h100x8", "exact", "no step is shorter so"),
    ],
)
def test_explain_tells_why_not(overrides: list[str], cluster: str, planner: str, told: str) -> None:
    plan = compiled(overrides, cluster, planner=planner)
    assert told in own_forward(plan, "values") and not own_forward(plan, "reward")


def test_what_is_proven_holds_for_both_searches() -> None:
    """A second search that ends early leaves a gap; after a first one that did, there is none."""
    draft = new_draft(hflow.load(PPO, WHOLE), load_cluster("h100x1"))
    own = compiled(WHOLE, planner="exhaustive")
    own = replace(own, search=Search(2, 0.0, own.step_time_s * 0.999, searched_gap=0.0))

    def found(first: Plan, second: Plan | NoneShorter) -> Search:
        def planned(draft: Draft) -> Plan:
            if not draft.sharing:
                return first
            assert draft.below_s == pytest.approx(0.999 * first.step_time_s)
            if isinstance(second, NoneShorter):
                raise second
            return second

        return planned_sharing(draft, planned).search

    early = found(own, NoneShorter("ppo", own.step_time_s * 0.9, 3))
    assert (early.gap, early.explored) == (pytest.approx(0.1), 5)
    late = found(own, NoneShorter("ppo", own.step_time_s * 0.9995, 3))
    assert (late.gap, late.bound_s, late.explored) == (0.0, own.search.bound_s, 5)
    shorter = replace(own, step_time_s=own.step_time_s * 0.95, search=Search(4, 0.0, own.step_time_s * 0.95))
    both = found(own, shorter)
    assert (both.gap, both.bound_s, both.explored) == (0.0, own.step_time_s * 0.95, 6)
    unproven = replace(own, search=replace(own.search, gap=0.2, searched_gap=0.2))
    tried = found(unproven, NoneShorter("ppo", 0.0, 0)).tried_sharing
    assert tried and tried.reason == "not all plans without that were searched"


def test_pins_decide_whether_a_pass_is_shared() -> None:
    refused = compiled(WHOLE, pins=["critic_train=no-share-forward"])
    assert not marks(refused) and "a pin refuses it" in own_forward(refused, "values")
    longer = compiled(LARGE, "h100x8", pins=["values=share-forward"])
    assert marks(longer) and longer.step_time_s >= compiled(LARGE, "h100x8").step_time_s
    again = compiled(WHOLE, pins=pins_of(refused))
    assert again.step_time_s == pytest.approx(refused.step_time_s, rel=1e-6) and not marks(again)
    shared = compiled(WHOLE)
    assert compiled(WHOLE, pins=pins_of(shared)).step_time_s == pytest.approx(shared.step_time_s, rel=1e-6)


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (["reward=share-forward"], "no node trains `reward`"),
        (["actor_train=share-forward"], "no node scores with `actor`"),
        (
            ["rollout=share-forward"],
            "`share-forward` is for score and train nodes, and `rollout` is a generate",
        ),
        (["values=share-forward", "critic_train=no-share-forward"], "another pin refuses it"),
        (["values=share-forward,offload"], "reads weights that are trained"),
        (["values=share-forward", "critic_train=pp2"], "cannot run"),
    ],
)
def test_what_cannot_be_shared_is_refused(pins: list[str], told: str) -> None:
    with pytest.raises(HflowError, match=f"HF302(.|\n)*{re.escape(told)}"):
        compiled(WHOLE, "h100x8", pins=pins)


def test_pins_decide_how_both_run() -> None:
    plan = compiled(WHOLE, pins=["values=micro16"])
    assert (plan.node("values").micro_batch, plan.node("critic_train").micro_batch) == (16, 16)
    assert marks(plan)
    apart = compiled(WHOLE, pins=["values=micro16", "critic_train=micro32"])
    assert not marks(apart) and "disagree about micro-batches" in own_forward(apart, "values")
    away = compiled(WHOLE, pins=["critic_train=offload"])
    assert not marks(away)


@pytest.mark.parametrize(
    ("node", "changes", "problem"),
    [
        (
            "values",
            {"micro_batch": 1},
            "`values` and `critic_train` share a forward pass and run in different",
        ),
        ("critic_train", {"strategy": PLAIN}, "share a forward pass and run in different ways"),
        ("reward", {"strategy": SHARES}, "`reward` has nobody to share its forward pass with"),
    ],
)
def test_plans_that_contradict_themselves_are_told(node: str, changes: dict[str, Any], problem: str) -> None:
    plan = compiled(WHOLE)
    nodes = tuple(replace(n, **changes) if n.node == node else n for n in plan.nodes)
    assert any(problem in told for told in misplaced(replace(plan, nodes=nodes)))
    assert not any("forward pass" in told for told in misplaced(plan))
