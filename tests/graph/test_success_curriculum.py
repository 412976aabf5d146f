"""What a graph says of a curriculum by success: a data node reads rows of an earlier step, and nobody waits
for them within a step."""

from __future__ import annotations

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.changes import check_changes
from hflow.graph.evaluation import evaluation_graph, named_graph
from hflow.graph.ir import Graph, Input, Ref
from hflow.graph.load import load, load_text
from hflow.graph.row_sources import SuccessCurriculum, curriculum, success_curriculum
from hflow.graph.types import Dim, Factor, ValueType
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.program import Carry, Recall, Transfer
from hflow.plan.run_state import run_state
from hflow.view import words

CURRICULUM = "nodes.prompts.with.curriculum"
SUCCESS = f"{CURRICULUM}={{success: reward.score, lag: 2}}"
SHAPE = "params.model=shape:qwen2.5-0.5b"


def by_success(*overrides: str) -> Graph:
    return load("grpo", [SUCCESS, SHAPE, *overrides])


def test_the_value_is_an_input_that_no_step_waits_for() -> None:
    graph = by_success()
    prompts, sampled = Factor("batch", 128, "prompts"), Factor("group", 8, "rollout")
    type_ = ValueType("f32", (Dim((prompts, sampled)),))
    assert graph.node("prompts").inputs == (Input("success", Ref("reward", "score"), type_, lag=2),)
    assert not graph.dag().has_edge("reward", "prompts")
    assert success_curriculum(graph.node("prompts").options) == SuccessCurriculum("reward.score", lag=2)
    assert curriculum(graph.node("prompts").options) is None
    assert load_text(to_yaml(graph)) == graph


def test_without_it_nothing_is_read() -> None:
    graph = load("grpo", ["nodes.prompts.with.curriculum={by: '1'}"])
    assert graph.node("prompts").inputs == () and success_curriculum(graph.node("prompts").options) is None


def test_evaluations_draw_rows_of_their_own() -> None:
    named = "evaluations={own: {rows: 16, metrics: {m: reward.score}}}"
    graph = by_success(named)
    for evaluated in (evaluation_graph(graph), named_graph(graph, graph.evaluations[0])):
        assert evaluated is not None
        assert all(node.inputs == () for node in evaluated.nodes if node.op == "data")
        assert {n.name.partition("@")[0] for n in evaluated.nodes} == {"prompts", "rollout", "reward"}


def test_a_plan_brings_it_to_all_devices_that_draw_and_keeps_it() -> None:
    """On devices of its own the reward's rows are kept where they are made, and move in the step that reads
    them, before it draws."""
    plan = hflow.compile(by_success(), "a100x8", ["actor_train=dp4@0-3", "rollout=dp4@4-7"])
    instructions = plan.step.instructions
    (carry,) = (i for i in instructions if isinstance(i, Carry))
    (recall,) = (i for i in instructions if isinstance(i, Recall))
    assert (carry.node, carry.lag, recall.lag) == ("reward", 2, 2)
    moves = [i for i in instructions if isinstance(i, Transfer) and i.node == "prompts"]
    drawn = next(n for n, i in enumerate(instructions) if i.op == "call" and i.node == "prompts")
    assert len(moves) == 1 and instructions.index(moves[0]) in instructions[drawn].after
    assert plan.step.data_edge(moves[0]).types[0].rows == 1024
    state = {t.name: (t.dtype, t.shape) for t in run_state(plan) if not t.name.startswith("models/")}
    assert state == {
        "carried/reward.score": ("f32", (None, 1024)),
        "data/prompts/tries": ("f32", (None,)),
        "data/prompts/successes": ("f32", (None,)),
        "data/prompts/drawn": ("i64", (None, 128)),
    }


def test_no_plan_has_more_state_without_it() -> None:
    plan = hflow.compile(load("grpo", [SHAPE]), "a100x8")
    assert all(t.name.startswith("models/") for t in run_state(plan))


@pytest.mark.parametrize(
    "new", [by_success("nodes.prompts.with.curriculum.floor=0.5"), load("grpo", [SHAPE])]
)
def test_a_run_may_go_on_with_another_order(new: Graph) -> None:
    old, allowed = by_success(), ["nodes.prompts.with.curriculum", "nodes.prompts.in"]
    with pytest.raises(HflowError, match="rows are drawn in another order from here on"):
        check_changes(old, new)
    used = allowed if not new.node("prompts").inputs else allowed[:1]
    assert check_changes(old, new, used) and check_changes(new, old, used)


@pytest.mark.parametrize(
    "change", ["nodes.prompts.with.curriculum.lag=1", "params.group=4", "params.batch=64"]
)
def test_a_run_cannot_go_on_with_counts_of_something_else(change: str) -> None:
    with pytest.raises(HflowError, match="the checkpoint has counts, and rows that wait to be counted"):
        check_changes(by_success(), by_success(change, "params.minibatch=64"), ["nodes", "params"])


def test_tables_tell_of_it() -> None:
    graph = by_success()
    assert words.all_carried(graph) == ["reward.score -> prompts, lag 2"]
    assert "prompts = data (success=%reward.score@-2) {" in ir(graph)
