"""Repeat regions: what stands in them, what leaves them, and what that is outside."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from hflow.diagnostics import HflowError
from hflow.graph.evaluation import evaluation_graph
from hflow.graph.ir import Graph, Ref, Region
from hflow.graph.load import load, load_text
from hflow.graph.types import Factor

DAPO = Path("tests/bad/parents/dapo.yaml")  # rounds of 6 prompts with 4 responses each, until 8 are kept
INNER = ["prompts", "rollout", "reward", "mixed"]


@pytest.fixture
def dapo() -> Graph:
    return load(DAPO)


def changed(old: str, new: str) -> Graph:
    text = DAPO.read_text()
    assert old in text
    return load_text(text.replace(old, new), "tests/bad/parents/changed.yaml")


def test_a_region_is_flattened_into_the_graph(dapo: Graph) -> None:
    assert [n.name for n in dapo.nodes] == [*INNER, "sampling", "advantages", "actor_train"]
    assert [n.name for n in dapo.inside("sampling")] == INNER
    assert [n.name for n in dapo.inside("step")] == ["sampling", "advantages", "actor_train"]
    assert dapo.regions == (
        Region("step", 10),
        Region("sampling", times=4, until=Ref("mixed", "keep"), rows=8, parent="step"),
    )


def test_its_own_node_reads_what_leaves_it(dapo: Graph) -> None:
    node = dapo.node("sampling")
    assert [(i.port, str(i.source)) for i in node.inputs] == [
        ("keep", "mixed.keep"),
        ("tokens", "rollout.tokens"),
        ("logprobs", "rollout.logprobs"),
        ("mask", "rollout.mask"),
        ("score", "reward.score"),
    ]
    assert node.options == {"rows": 8, "times": 4, "short": "fail", "max_age": 0}
    assert changed("times: 4", "times: 4\n    short: fill").node("sampling").options["short"] == "fill"


def test_what_leaves_it_has_as_many_rows_as_were_asked_for(dapo: Graph) -> None:
    assert {o.port: str(o.type) for o in dapo.node("sampling").outputs} == {
        "tokens": "i32[batch*group, seq~]",
        "logprobs": "f32[batch*group, resp~]<actor@k behaviour>",
        "mask": "bool[batch*group, resp~]",
        "score": "f32[batch*group]",
    }
    assert dapo.node("rollout").rows == 6 * 4
    assert dapo.node("sampling").rows == 8 * 4
    assert [n.rows for n in dapo.nodes[-2:]] == [32, 32]


def test_rows_and_texts_that_leave_it_are_its_own(dapo: Graph) -> None:
    tokens = dapo.node("sampling").output("tokens")
    assert tokens
    rows, texts = tokens.type.dims
    assert rows.factors == (Factor("batch", 8, "sampling"), Factor("group", 4, "rollout"))
    assert texts.factors == (Factor("seq", 512 + 16, "sampling/rollout"),)


def test_a_mask_is_found_through_the_region(dapo: Graph) -> None:
    mask = dapo.node("actor_train").input("mask")
    assert mask and mask.derived and mask.source == Ref("sampling", "mask")
    with pytest.raises(HflowError) as caught:
        changed("mask: rollout.mask, ", "")
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.help) == ("HF207", "wire `mask`, or let `sampling` produce `mask`")


def test_values_of_one_row_leave_it_too() -> None:
    graph = changed(
        "score: reward.score}\n  advantages", "score: reward.score, answer: prompts.answer}\n  advantages"
    )
    answer = graph.node("sampling").output("answer")
    assert answer and str(answer.type) == "str[batch]" and answer.type.rows == 8


def test_it_comes_when_what_it_reads_is_there() -> None:
    """Its nodes come before its own node, those that nobody reads too, wherever they stand in the file."""
    text = DAPO.read_text()
    unread = (
        '      unread: {op: call, fn: "../functions.py:positive", in: {score: reward.score}}\n      prompts:'
    )
    head, _, sampling = text.partition("  sampling:")
    sampling, _, rest = sampling.partition("  advantages:")
    body = f"  advantages:{rest}  sampling:{sampling}".replace("      prompts:", unread)
    graph = load_text(head + body, "tests/bad/parents/changed.yaml")
    position = {n.name: i for i, n in enumerate(graph.nodes)}
    assert all(position[name] < position["sampling"] for name in [*INNER, "unread"])
    assert all(position[a] < position[b] for a, b in graph.dag().edges)
    assert nx.is_directed_acyclic_graph(graph.dag())


def test_two_regions() -> None:
    second = """\
  second:
    op: repeat
    until: {rows: 2, keep: easy.keep}
    times: 3
    nodes:
      texts: {op: data, with: {dataset: more.jsonl, batch: 4}, out: {text: "str[text]"}}
      numbers: {op: call, fn: hflow.ops.rewards.format_match, in: {text: texts.text}, with: {pattern: x}}
      easy: {op: call, fn: "../functions.py:positive", in: {score: numbers.score}}
    out: {text: texts.text}
  advantages:"""
    graph = changed("  advantages:", second)
    assert [r.name for r in graph.regions] == ["step", "sampling", "second"]
    assert [n.name for n in graph.inside("second")] == ["texts", "numbers", "easy"]
    text = graph.node("second").output("text")
    assert text and text.type.dims[0].factors == (Factor("text", 2, "second"),)


def test_evaluation_runs_its_nodes_once() -> None:
    held_out = DAPO.read_text().replace("batch: 6,", "batch: 6, holdout: 16,")
    evaluated = load_text(
        held_out + "eval: {metric: reward.score, rows: 16}\n", "tests/bad/parents/changed.yaml"
    )
    graph = evaluation_graph(evaluated)
    assert graph and [n.name for n in graph.nodes] == ["prompts", "rollout", "reward"]
    assert graph.regions == (Region("step", 10),)
    assert {n.region for n in graph.nodes} == {"step"}
    assert [n.rows for n in graph.nodes] == [16, 16, 16]


def test_a_node_may_be_called_like_the_step_loop() -> None:
    """And is no region because of it."""
    graph = load(Path("algorithms/grpo.yaml"), ["loop.name=reward"])
    assert graph.node("reward").op == "call" and graph.node("rollout").region == "reward"
