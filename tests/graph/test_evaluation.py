from __future__ import annotations

from pathlib import Path

from hflow.graph.evaluation import evaluation_graph
from hflow.graph.ir import Graph, Ref
from hflow.graph.load import load, load_text

GRPO = Path("algorithms/grpo.yaml")


def evaluation(*overrides: str) -> Graph:
    graph = evaluation_graph(load(GRPO, overrides))
    assert graph
    return graph


def test_only_what_the_metric_needs_runs() -> None:
    assert [n.name for n in evaluation().nodes] == ["prompts", "rollout", "reward"]


def test_one_greedy_sample_per_held_out_prompt() -> None:
    graph = evaluation("params.holdout=48")
    assert graph.node("prompts").options["batch"] == 48
    assert graph.node("rollout").options["n"] == 1
    assert graph.node("rollout").options["temperature"] == 0
    assert graph.node("rollout").options["max_new_tokens"] == 4
    assert [n.rows for n in graph.nodes] == [48, 48, 48]


def test_grouping_survives_a_group_of_one() -> None:
    graph = evaluation("eval.metric=advantages.advantages")
    assert [n.name for n in graph.nodes][-1] == "advantages"


def test_everything_else_is_as_in_the_step() -> None:
    step, graph = load(GRPO), evaluation()
    assert graph.models == step.models
    assert graph.node("reward").function == step.node("reward").function
    assert graph.node("prompts").options == {**step.node("prompts").options, "batch": 512}
    sources = [(i.port, i.source, i.derived, i.span) for i in step.node("reward").inputs]
    assert [(i.port, i.source, i.derived, i.span) for i in graph.node("reward").inputs] == sources


def test_derived_edges_stay_derived() -> None:
    total = '  total: {op: call, fn: "./functions.py:scored_only", in: {logprobs: ref_logprobs.logprobs}}\n'
    text = GRPO.read_text().replace("metric: reward.score", "metric: total.total") + total
    graph = evaluation_graph(load_text(text, "tests/bad/grpo.yaml"))
    assert graph and [n.name for n in graph.nodes] == ["prompts", "rollout", "ref_logprobs", "total"]
    masks = [i for _, i in graph.edges() if i.port == "mask"]
    assert [(i.source, i.derived, i.type.rows) for i in masks] == [(Ref("rollout", "mask"), True, 512)] * 2


def test_a_graph_without_evaluation_has_none() -> None:
    assert evaluation_graph(load("algorithms/sft.yaml")) is None
