from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.changes import changes
from hflow.graph.evaluation import evaluation_graph, named_graph
from hflow.graph.ir import Graph, NamedEvaluation
from hflow.graph.load import check, load, load_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml

FILE = Path("tests/runtime/graphs/evaluated.yaml")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load(FILE)


def named(graph: Graph, name: str) -> NamedEvaluation:
    return next(evaluation for evaluation in graph.evaluations if evaluation.name == name)


def rows(evaluation: NamedEvaluation) -> dict[str, int]:
    return {node.name: node.rows for node in evaluation.nodes}


def test_types_have_the_sizes_of_the_evaluation(graph: Graph) -> None:
    greedy, sampled = named(graph, "greedy"), named(graph, "sampled")
    assert rows(greedy) == {"prompts@greedy": 7, "rollout@greedy": 7, "reward@greedy": 7}
    assert rows(sampled) == {
        "prompts@sampled": 5,
        "rollout@sampled": 30,
        "reward@sampled": 30,
        "eval/sampled/pass@1": 5,
        "eval/sampled/pass@4": 5,
        "eval/sampled/maj@3/answer": 30,
        "eval/sampled/maj@3": 5,
    }
    lengths = [e.nodes[1].type_of("mask").dims[1].size for e in (greedy, sampled)]
    assert lengths == [9, graph.node("rollout").type_of("mask").dims[1].size]


def test_options_are_those_of_the_step_but_for_what_is_said(graph: Graph) -> None:
    own = named_graph(graph, named(graph, "greedy"))
    prompts, rollout = graph.node("prompts").options, graph.node("rollout").options
    dataset = "tests/runtime/graphs/evaluated.jsonl"
    alone = {"dataset": dataset, "batch": 7, "holdout": 0, "shuffle": False}
    assert own.node("prompts@greedy").options == {**prompts, **alone}
    assert own.node("rollout@greedy").options == {**rollout, "n": 1, "temperature": 0.0, "max_new_tokens": 9}
    held_out = named_graph(graph, named(graph, "sampled")).node("prompts@sampled").options
    assert held_out == {**prompts, "batch": 5}


def test_one_that_says_what_eval_does_runs_what_eval_runs() -> None:
    """But for the names of nodes; what `eval` runs keeps the types of training, where nobody is greedy."""
    extra = "same: {rows: 512, sampling: {n: 1, temperature: 0}, metrics: {score: reward.score}}"
    graph = load("algorithms/grpo.yaml", [f"evaluations={{{extra}}}"])
    short, own = evaluation_graph(graph), named_graph(graph, graph.evaluations[0])
    assert short
    assert ir(own).replace("@same", "").replace("same", "").replace(" temperature=0.0", "") == ir(short)


def test_the_file_of_a_graph_says_all_of_them(graph: Graph) -> None:
    assert load_text(to_yaml(graph)) == graph
    assert "evaluation sampled rows=5 every=2 at=end sampling{n=6, temperature=0.9}" in ir(graph)


def test_they_are_due_at_start_and_end_and_in_between(graph: Graph) -> None:
    greedy, sampled = named(graph, "greedy"), named(graph, "sampled")
    assert [done for done in range(6) if greedy.is_due(done, 5)] == [0, 5]
    assert [done for done in range(6) if sampled.is_due(done, 5)] == [2, 4, 5]
    between = replace(sampled, at=())
    assert [done for done in range(6) if between.is_due(done, 5)] == [2, 4]


def test_a_run_may_go_on_with_others(graph: Graph) -> None:
    found = changes(graph, replace(graph, evaluations=graph.evaluations[1:]))
    assert found and all(change.harmless for change in found)
    other = load(FILE, ["evaluations.sampled.sampling.n=8"])
    assert [c.key for c in changes(graph, other)] == ["evaluations.sampled.sampling.n"]


def test_nodes_of_a_region_run_once_and_carried_values_are_read() -> None:
    said = "evaluations={test: {rows: 12, metrics: {score: reward.score}}}"
    region = load("algorithms/dapo.yaml", [said])
    assert region.node("reward").region == "sampling"
    own = named_graph(region, region.evaluations[0])
    assert {node.region for node in own.nodes} == {region.regions[0].name} and len(own.regions) == 1
    carried = load(
        "tests/runtime/graphs/carried.yaml",
        ["evaluations={test: {rows: 8, metrics: {scaled: scaled.scaled}}}", "eval=null"],
    )
    lags = [value.lag for _, value in named_graph(carried, carried.evaluations[0]).edges() if value.lag]
    assert lags


def test_options_of_a_later_turn_go_to_it() -> None:
    said = "test: {rows: 512, sampling: {n: 2, temperature: 0.5}, metrics: {score: reward.score}}"
    graph = load("algorithms/tool_grpo.yaml", ["eval=null", f"evaluations={{{said}}}"])
    samplers = [node for node in graph.evaluations[0].nodes if node.op == "generate"]
    assert len(samplers) > 1
    assert [node.options["temperature"] for node in samplers] == [0.5] * len(samplers)
    assert [node.options.get("n") for node in samplers] == [2, *[None] * (len(samplers) - 1)]


def test_best_that_is_measured_at_other_steps_is_a_warning() -> None:
    run = "run={checkpoint: {every: 3, best: eval/sampled/pass@4}}"
    _, warnings = check(FILE, [run])
    assert [w.code for w in warnings] == ["HF228"] and "every 3 steps" in warnings[0].message
    _, warnings = check(FILE, [run.replace("3", "4")])
    assert warnings == ()
    with pytest.raises(HflowError, match="no evaluation measures `eval/sampled/pass@5`"):
        load(FILE, [run.replace("@4", "@5")])


def test_the_builder_says_the_same(graph: Graph) -> None:
    g = GraphBuilder("built", steps=2)
    actor = g.model("actor", path="models/tiny")
    prompts = g.data(
        "prompts", out={"tokens": "i32[batch, prompt~]", "answer": "str[batch]"}, dataset="sums.jsonl",
        batch=8, holdout=4, prompt="{{ question }}=",
    )  # fmt: skip
    rollout = g.generate("rollout", model=actor, prompt=prompts.tokens, n=2, max_new_tokens=4)
    reward = g.call("reward", "hflow.ops.rewards.exact_match", text=rollout.text, answer=prompts.answer)
    g.evaluation(
        "test", rows=4, sampling={"n": 4}, at=[],
        metrics={"score": reward.score, "pass@2": {"pass": reward.score, "k": 2}}, every=1,
    )  # fmt: skip
    found = g.graph()
    assert found.evaluations[0].keys == ("eval/test/score", "eval/test/pass@2")
    assert found.evaluations[0].at == () and rows(found.evaluations[0])["rollout@test"] == 16
    assert load_text(to_yaml(found)) == found
