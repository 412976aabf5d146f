"""`timeout_s` of a `call` node, wherever it is written and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.changes import changes
from hflow.graph.infer.kinds.call import time_limit_s
from hflow.graph.ir import Graph
from hflow.graph.load import load, load_text
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.verify.graph_consistency import broken_graph

GRPO = Path("algorithms/grpo.yaml")
LIMIT = "nodes.reward.with.timeout_s"
F32 = ("models.actor.dtype=f32", "models.ref.dtype=f32")  # as a plan's graph has it


def limited(value: object) -> Graph:
    return load(GRPO, (f"{LIMIT}={value}", *F32))


def test_a_graph_without_it_is_as_it_was() -> None:
    """So are its hash, and that of its plans."""
    for node in load(GRPO).nodes:
        assert "timeout_s" not in node.options and time_limit_s(node) is None


@pytest.mark.parametrize(("written", "meant"), [(2, 2.0), ("0.5", 0.5)])
def test_it_is_read_and_written(written: object, meant: float) -> None:
    graph = limited(written)
    assert time_limit_s(graph.node("reward")) == meant and time_limit_s(graph.node("advantages")) is None
    assert load_text(to_yaml(graph), str(GRPO)) == graph
    assert list(broken_graph(graph)) == [] and list(broken_graph(load(GRPO, F32))) == []


def test_a_param_may_give_it() -> None:
    graph = load_text(
        f"hflow: 1\nextends: {GRPO}\nname: limited\nparams: {{patience: 3}}\n"
        'nodes:\n  reward: {with: {timeout_s: "${ 2 * patience }"}}\n',
        "limited.yaml",
    )
    assert time_limit_s(graph.node("reward")) == 6.0


@pytest.mark.parametrize("value", ["0", "-1", "soon", "true", ".inf"])
def test_what_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(HflowError, match="HF212.*`timeout_s` must be a finite number > 0"):
        limited(value)


def test_a_plan_with_what_is_no_time_is_refused() -> None:
    graph = limited(2)
    reward = replace(graph.node("reward"), options={"timeout_s": -1})
    nodes = tuple(reward if node.name == "reward" else node for node in graph.nodes)
    (told,) = broken_graph(replace(graph, nodes=nodes))
    assert told == "option `timeout_s` of node `reward` is not a finite number > 0"


def test_only_functions_of_nodes_have_it() -> None:
    with pytest.raises(HflowError, match="HF211.*unknown option `timeout_s`"):
        load(GRPO, ("nodes.rollout.with.timeout_s=2",))


def test_a_function_cannot_have_one_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hflow.ops.op import op\n\n"
        '@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")\n'
        "def f(text, answer, *, timeout_s: float = 1.0):\n    return text\n"
    )
    with pytest.raises(HflowError, match="HF206.*its option `timeout_s` is one of the call node itself"):
        load(GRPO, (f"nodes.reward.fn={tmp_path}/mine.py:f",))


def test_a_graph_from_before_may_have_a_function_with_one() -> None:
    """Then it is the function's, and no limit."""
    node = limited(2).node("reward")
    assert node.function
    old = replace(node, function=replace(node.function, options={"timeout_s": 1.0}))
    assert time_limit_s(old) is None


def test_python_gives_it() -> None:
    g = GraphBuilder("mine", steps=1)
    actor = g.model("actor", "models/tiny")
    columns = {"tokens": "i32[batch, prompt~]", "answer": "str[batch]"}
    prompts = g.data("prompts", out=columns, dataset="d.jsonl", batch=1, prompt="x")
    rollout = g.generate("rollout", model=actor, prompt=prompts.tokens, max_new_tokens=8)
    exact = "hflow.ops.rewards.exact_match"
    g.call("limited", exact, timeout_s=1.5, text=rollout.text, answer=prompts.answer)
    g.call("unlimited", exact, text=rollout.text, answer=prompts.answer)
    graph = g.graph()
    assert [time_limit_s(graph.node(name)) for name in ("limited", "unlimited")] == [1.5, None]


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (2, 3)])
def test_a_run_may_go_on_with_another(before: int | None, after: int | None) -> None:
    old, new = (load(GRPO, F32) if value is None else limited(value) for value in (before, after))
    (change,) = changes(old, new)
    assert change.key == LIMIT and change.harmless and "no value depends on it" in change.meaning
