"""Scalars that are carried from step to step."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from hflow.graph.evaluation import evaluation_graph
from hflow.graph.ir import Graph, Ref
from hflow.graph.load import load, load_text

BASELINE = Path("tests/bad/parents/baseline.yaml")
TWO_NODES = """\
hflow: 1
extends: grpo.yaml
name: scaled
nodes:
  advantages:
    fn: "../functions.py:scaled_by"
    in: {scale: {from: mean.mean, lag: 2, init: 1}}
  mean: {op: call, fn: "../functions.py:mean", in: {score: advantages.score}}
  actor_train: {in: {advantages: advantages.score}}
"""


def carried(text: str) -> Graph:
    return load_text(text, "tests/bad/parents/changed.yaml")


def test_a_node_reads_itself_a_step_ago() -> None:
    graph = load(BASELINE)
    node = graph.node("advantages")
    before = node.input("baseline")
    assert before
    assert (str(before.source), str(before.type), before.lag, before.init) == (
        "advantages.baseline",
        "f32[]",
        1,
        0.0,
    )
    assert {o.port: str(o.type) for o in node.outputs} == {
        "advantages": "f32[batch*group]",
        "baseline": "f32[]",
    }
    assert node.function and node.function.whole_batch
    score = node.input("score")
    assert score and (score.lag, score.init) == (0, 0.0)


def test_it_is_no_edge_within_a_step() -> None:
    dag = load(BASELINE).dag()
    assert not dag.has_edge("advantages", "advantages")
    assert nx.is_directed_acyclic_graph(dag)
    assert not carried(TWO_NODES).dag().has_edge("mean", "advantages")


def test_a_node_reads_a_later_one() -> None:
    graph = carried(TWO_NODES)
    order = [n.name for n in graph.nodes]
    assert order.index("advantages") < order.index("mean")
    scale = graph.node("advantages").input("scale")
    assert scale and (scale.source, scale.lag, scale.init) == (Ref("mean", "mean"), 2, 1.0)


def test_without_lag_the_two_would_wait_for_each_other() -> None:
    with pytest.raises(Exception, match=r"HF204\]: cycle within one step: advantages -> mean -> advantages"):
        carried(TWO_NODES.replace("{from: mean.mean, lag: 2, init: 1}", "mean.mean"))


def test_a_scalar_of_the_same_step_is_a_plain_edge() -> None:
    text = TWO_NODES.replace("{from: mean.mean, lag: 2, init: 1}", "mean.mean")
    graph = carried(text.replace("in: {score: advantages.score}", "in: {score: reward.score}"))
    scale = graph.node("advantages").input("scale")
    assert scale and (str(scale.type), scale.lag) == ("f32[]", 0)
    assert graph.dag().has_edge("mean", "advantages")


def test_a_mask_is_found_beside_carried_values() -> None:
    """Its text is told by the other inputs, though the carried one has no type yet."""
    text = """\
hflow: 1
extends: grpo.yaml
name: held
nodes:
  spread: {op: call, fn: "../functions.py:needs_mask", in: {score: reward.score, mask: rollout.mask}}
  held:
    op: call
    fn: "../functions.py:held_back"
    in: {values: spread.spread, limit: {from: held.limit, lag: 1, init: 0.5}}
  actor_train: {in: {advantages: held.values}}
"""
    mask = carried(text).node("held").input("mask")
    assert mask and mask.derived and mask.source == Ref("rollout", "mask")


def test_evaluation_reads_them_as_the_step_does() -> None:
    text = (
        BASELINE.read_text()
        + "  prompts: {with: {holdout: 16}}\neval: {metric: advantages.advantages, rows: 16}\n"
    )
    graph = evaluation_graph(carried(text))
    assert graph
    before = graph.node("advantages").input("baseline")
    assert before and (before.lag, before.init) == (1, 0.0)
    assert graph.node("advantages").rows == 16
