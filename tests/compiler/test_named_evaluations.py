"""Programs and prices of named evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.cost.compute import node_time_s
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan, graph_hash, to_json
from hflow.plan.plan_file import load_plan
from hflow.plan.program import Call, SyncWeights
from hflow.plan.workload import workload
from hflow.view.terminal.terminal import plan_text

TEST = "test: {rows: 96, sampling: {n: 4}, metrics: {p: {pass: reward.score, k: 2}}, every: 25}"
SHAPE = "params.model=shape:qwen2.5-0.5b"
F32 = ("models.actor.dtype=f32", "models.ref.dtype=f32")


def compiled(*overrides: str, cluster: str = "a100x8", pins: tuple[str, ...] = ()) -> Plan:
    graph = hflow.load("algorithms/grpo.yaml", [SHAPE, *F32, "eval=null", *overrides])
    return hflow.compile(graph, cluster, pins)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(f"evaluations={{{TEST}}}")


def test_without_them_nothing_says_so() -> None:
    """Plans and their hashes are those from before there were any."""
    plan = compiled()
    assert "evaluations" not in to_json(plan)
    assert plan.hash != compiled(f"evaluations={{{TEST}}}").hash
    assert graph_hash(plan.graph) != graph_hash(compiled(f"evaluations={{{TEST}}}").graph)


def test_nodes_run_where_those_of_the_step_do_at_their_own_price(plan: Plan) -> None:
    (named,) = plan.evaluations
    rollout, step = plan.node("rollout@test"), plan.node("rollout")
    assert (rollout.mesh, rollout.strategy, rollout.engine) == (step.mesh, step.strategy, step.engine)
    node = named.program.graph.node("rollout@test")
    shape, model = plan.shapes["actor"], plan.graph.model("actor")
    expected = node_time_s(
        "generate", shape, model.dtype, workload(node), rollout.mesh, rollout.micro_batch, plan.cluster,
        rollout.strategy,
    )  # fmt: skip
    assert rollout.time_s == expected != step.time_s
    calls = [i.time_s for i in named.program.instructions if isinstance(i, Call)]
    assert max(calls) == expected and expected < named.time_s <= sum(
        getattr(i, "time_s", 0.0) for i in named.program.instructions
    )


def test_the_step_is_as_without_them(plan: Plan) -> None:
    without = compiled()
    assert plan.nodes == without.nodes and plan.step_time_s == without.step_time_s
    assert plan.step.instructions == without.step.instructions


def test_a_plan_file_holds_them(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert load_plan(tmp_path / "plan.json").hash == plan.hash


def test_the_text_tells_what_they_take(plan: Plan) -> None:
    (line,) = [line for line in plan_text(plan, 200).splitlines() if line.startswith("eval ")]
    assert "test: 96 rows (every 25 steps, start, end)" in line and "11 times" in line


def test_longer_responses_need_their_memory() -> None:
    """Fewer rows at once where a device does not hold more; what they need is counted."""
    rows = "rows: 512, metrics: {score: reward.score}"
    said = f"evaluations={{test: {{{rows}, sampling: {{n: 8, max_new_tokens: %d}}}}}}"
    fits, longer = compiled(said % 500), compiled(said % 30_000)
    assert fits.node("rollout@test").micro_batch == fits.node("rollout").micro_batch
    assert 1 < longer.node("rollout@test").micro_batch < longer.node("rollout").micro_batch
    for plan in (fits, longer):
        assert plan.node("rollout@test").memory_bytes > plan.node("rollout").memory_bytes
    assert [m.node for m in longer.memory] == ["rollout@test"]
    assert all(m.peak_bytes <= m.capacity_bytes for m in longer.memory)
    with pytest.raises(HflowError, match="HF304.*`rollout@test` samples up to 40000 tokens"):
        compiled(said % 40_000)


def test_an_evaluation_has_no_more_replicas_than_rows() -> None:
    few = "evaluations={test: {rows: 3, metrics: {score: reward.score}}}"
    assert compiled(few).node("rollout@test").mesh.dp <= 3
    with pytest.raises(HflowError, match="dp8 is more than the 3 rows of evaluation `test`"):
        compiled(few, pins=("rollout=dp8",))


@pytest.fixture
def lagged() -> Graph:
    said = "test: {rows: 8, metrics: {length: length.length}}"
    return hflow.load(
        "tests/runtime/graphs/lagged.yaml",
        ["params.model=shape:qwen2.5-0.5b", "eval.metric=length.length", f"evaluations={{{said}}}"],
    )


def test_readers_of_older_weights_are_evaluated_with_the_newest(lagged: Graph) -> None:
    """As `eval` does: the weights come to the reader's devices first, and go after it."""
    plan = hflow.compile(lagged, "a100x8", ["actor_train=dp2@0-1", "rollout=tp2@2-3"])
    assert plan.evaluation
    own, short = plan.evaluations[0].program, plan.evaluation
    syncs = [[i for i in p.instructions if isinstance(i, SyncWeights)] for p in (own, short)]
    assert [i.node for i in syncs[0]] == ["rollout@test"]
    assert [i.devices for i in syncs[0]] == [i.devices for i in syncs[1]]
