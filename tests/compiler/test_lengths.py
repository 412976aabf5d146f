"""Plans of graphs that state lengths."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest

import hflow
from hflow.compiler.planner.search import exhaustive, search
from hflow.cost.activation_memory import kv_cache_bytes
from hflow.graph.lengths import Lengths
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan, to_json
from hflow.plan.plan_file import load_plan
from hflow.plan.row_lengths import counted_at_greatest, row_lengths
from hflow.plan.verify.consistency import inconsistencies
from hflow.view.terminal.plan_json import plan_json
from hflow.view.terminal.terminal import plan_text
from tests.compiler.small_cases import case, space_of

LLAMA = ("models.actor.path=shape:llama-3.1-8b", "models.ref.path=shape:llama-3.1-8b")
BF16 = ("models.actor.dtype=bf16", "models.ref.dtype=bf16")
# NeMo-RL's performance summary, v0.5: GRPO, 64 prompts x 32 responses of 4,096 tokens at most and 1,019 on
# average, batches of 512, on 16 H100.
SIZES = ("params.batch=64", "params.group=32", "params.max_new_tokens=4096", "params.minibatch=512")
PROMPTS = "nodes.prompts.with.max_prompt_tokens=128"
PUBLISHED_S = 92.8
STATED = ("nodes.rollout.lengths={mean: 1019}", "nodes.prompts.lengths.mean=100")


def published(*overrides: str, engine: str = "megatron") -> Plan:
    graph = hflow.load("algorithms/grpo.yaml", [*LLAMA, *BF16, *SIZES, PROMPTS, *overrides])
    return hflow.compile(graph, "h100x16", engines=(f"rollout={engine}",))


@pytest.mark.parametrize("engine", ["megatron", "sglang"])
def test_a_published_step_is_predicted_better_with_its_lengths(engine: str) -> None:
    """Nothing is fitted to it. At the greatest lengths the step counts twice as long as it was. The plan is
    the best that there is, not the published one."""
    greatest, stated = (published(*said, engine=engine).step_time_s for said in ((), STATED))
    assert greatest > 1.9 * PUBLISHED_S
    assert 0.4 * PUBLISHED_S < stated < PUBLISHED_S


def test_plans_say_their_lengths(tmp_path: Path) -> None:
    plan, unsaid = published(*STATED), published()
    assert plan.tokens_per_step == 64 * 32 * 1119
    assert "lengths" not in to_json(unsaid) and "lengths " not in plan_text(unsaid)
    text = "prompts of prompts 100 tokens on average, 128 at most; responses of rollout 1,019"
    assert text in " ".join(plan_text(plan).split())
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").hash == plan.hash != unsaid.hash
    own = {node: (row_lengths(plan.graph, plan.graph.node(node))) for node in ("ref_logprobs", "actor_train")}
    assert {(o.prompts, o.responses) for o in own.values()} == {(Lengths(100, 128), Lengths(1019, 4096))}
    assert counted_at_greatest(plan.graph) == counted_at_greatest(unsaid.graph) == {}


def test_a_mean_that_is_the_greatest_changes_nothing_but_what_last_batches_cost() -> None:
    """These count at their size where lengths are stated, else as if they were full."""
    said, unsaid = published("nodes.rollout.lengths.mean=4096", "nodes.prompts.lengths.mean=128"), published()
    assert 0.995 * unsaid.step_time_s < said.step_time_s <= unsaid.step_time_s
    assert said.node("rollout").time_s == pytest.approx(unsaid.node("rollout").time_s, rel=1e-9)
    assert [n.mesh for n in said.nodes] == [n.mesh for n in unsaid.nodes]


def test_what_cannot_be_traced_counts_at_the_greatest() -> None:
    """A later turn's prompt is all that came before, of which nobody says how long it is."""
    graph = hflow.load("algorithms/tool_grpo.yaml", ["nodes.rollout.lengths.mean=2"])
    found = counted_at_greatest(graph)
    assert found["rows"] and "rollout" not in found["rows"]
    assert found["prompts"] == ["rollout"]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_search_finds_the_best_of_all_plans(name: str) -> None:
    for seed in range(2):
        draft = case(name, seed, 1500, ("nodes.rollout.lengths={mean: 5, p95: 14}",))
        expected, found = exhaustive(space_of(draft)), search(space_of(draft), float("inf"), resolution=0.0)
        assert (expected.choice is None) == (found.choice is None)
        if expected.choice and found.choice:
            assert isclose(found.choice.step_s, expected.choice.step_s, rel_tol=1e-9)


def test_a_server_has_more_rows_in_flight_than_fit_at_their_greatest_lengths() -> None:
    """Its cache is what the plan counts, and the head of the plan says how much that is."""
    plan, unsaid = published(*STATED, engine="sglang"), published(engine="sglang")
    rollout = plan.node("rollout")
    assert rollout.cache_tokens and not unsaid.node("rollout").cache_tokens
    assert "cache_tokens" not in to_json(unsaid) and "cache_tokens" in to_json(plan)
    assert 4224 < rollout.cache_tokens < 0.5 * rollout.micro_batch * 4224
    cache = kv_cache_bytes(plan.shapes["actor"], "bf16", rollout.cache_tokens, rollout.mesh)
    assert cache < rollout.memory_bytes < 1.2 * cache
    told = f"rollout: {rollout.cache_tokens:,} tokens for {rollout.micro_batch} rows in flight"
    assert told in " ".join(plan_text(plan).split())
    nodes = {node["name"]: node for node in plan_json(plan, 0.0)["nodes"]}
    assert nodes["rollout"]["cache_tokens"] == rollout.cache_tokens
    assert "cache_tokens" not in nodes["actor_train"]


def test_a_cache_holds_one_row_of_the_greatest_length_at_least() -> None:
    plan = published(*STATED, engine="sglang")
    small = tuple(replace(n, cache_tokens=4223) if n.node == "rollout" else n for n in plan.nodes)
    assert list(inconsistencies(plan)) == []
    (problem,) = inconsistencies(replace(plan, nodes=small))
    assert problem == "node `rollout` has a KV cache of 4,223 tokens, and its rows may have 4,224"


def test_more_memory_has_more_rows_in_flight_and_is_no_slower() -> None:
    cluster, found = load_cluster("h100x16"), list[tuple[int, float]]()
    graph = hflow.load("algorithms/grpo.yaml", [*LLAMA, *BF16, *SIZES, *STATED, PROMPTS])
    pins = ["actor_train=pp2,dp8@0-15", "ref_logprobs=pp2,dp8@0-15", "rollout=dp16,tp1@0-15"]
    for gb in (41, 42, 43, 80):
        larger = replace(cluster, device=replace(cluster.device, memory_bytes=gb * 10**9))
        node = hflow.compile(graph, larger, pins, engines=("rollout=sglang",)).node("rollout")
        found.append((node.micro_batch, -node.time_s))
    assert found == sorted(found) and found[0][0] < found[1][0] < found[2][0]
