"""Rows longer than a model's positions are known when they are read, not in the step that draws them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Node
from hflow.plan.plan import Plan
from hflow.runtime.engines.python.data import Example, open_source
from hflow.runtime.positions import check_positions
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("positions") / "model"
    new_model(folder, layers=1, hidden=16, heads=2, alphabet="0123456789+=", max_positions=32)
    return folder


def dataset(folder: Path, answer: int = 24) -> Path:
    """16 rows, of which row 5 has the longest question, 24 characters, and row 9 the longest answer."""
    rows = [{"question": str(1000 + i), "answer": str(i)} for i in range(16)]
    rows[5]["question"] = "5" * 24
    rows[9]["answer"] = "9" * answer
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


SMALL = [
    *("nodes.prompts.with.batch=4", "nodes.prompts.with.holdout=2", "eval.rows=2"),
    *("nodes.prompts.with.max_prompt_tokens=30", "nodes.actor_train.repeat.minibatch=4"),
]
SUPERVISED = """
hflow: 1
name: supervised
params: {model: m, dataset: d}
models: {actor: {path: "${ model }"}}
loop: {name: step, times: 1}
nodes:
  examples:
    op: data
    with: {dataset: "${ dataset }", batch: 4, prompt: "{{ question }}=", response: "{{ answer }}"}
    out: {tokens: "i32[batch, seq~]", mask: "bool[batch, resp~]"}
  actor_train:
    op: train
    model: actor
    loss: hflow.ops.losses.negative_log_likelihood
    in: {tokens: examples.tokens}
    with: {lr: 0.1}
"""


def compiled(
    graph: Path, model: Path, dataset: Path, *overrides: str
) -> tuple[Plan, Node, tuple[Example, ...], Callable[[int], str]]:
    """A plan, its data node, the rows of that, and where they are."""
    given = [f"params.model={model}", f"params.dataset={dataset}", *overrides]
    plan = hflow.compile(hflow.load(graph, given), "local1")
    (node,) = (n for n in plan.graph.nodes if n.op == "data")
    source = open_source(node, {"actor": load_tokenizer(model)})
    rows = source.dataset
    return plan, node, (*rows.train, *rows.held_out), source.where


def refusal(graph: Path, model: Path, dataset: Path, *overrides: str) -> Diagnostic:
    with pytest.raises(HflowError) as caught:
        check_positions(*compiled(graph, model, dataset, *overrides))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF403" and "`max_prompt_tokens`" in diagnostic.help
    return diagnostic


def test_a_prompt_after_which_a_rollout_has_too_few_positions_is_named(model: Path, tmp_path: Path) -> None:
    """The question and `=`: 25 tokens, so 7 may follow."""
    graph, data = tmp_path / "graph.yaml", dataset(tmp_path)
    text = Path("tests/runtime/grpo_small.yaml").read_text()
    text = text.replace("./rewards.py", str(Path("tests/runtime/rewards.py").absolute()))
    graph.write_text(
        text.replace("tests/runtime/sums.jsonl", str(data)).replace("params: {", "params: {dataset: x, ")
    )
    check_positions(*compiled(graph, model, data, *SMALL, "nodes.rollout.with.max_new_tokens=7"))
    found = refusal(graph, model, data, *SMALL, "nodes.rollout.with.max_new_tokens=8")
    needs = "33 positions in `rollout` (25 tokens and up to 8 new ones)"
    assert found.message == f"row 5 of `{data}` needs {needs}; model `actor` has 32"


@pytest.mark.parametrize(("answer", "fits"), [(26, True), (27, False)])
def test_a_response_that_is_too_long_to_learn_from_is_named(
    model: Path, tmp_path: Path, answer: int, fits: bool
) -> None:
    """After 5 tokens of the prompt, with an end token; no layer would tell that its positions have no end."""
    graph, data = tmp_path / "graph.yaml", dataset(tmp_path, answer)
    graph.write_text(SUPERVISED)
    if fits:
        check_positions(*compiled(graph, model, data))
        return
    found = refusal(graph, model, data)
    assert (
        found.message
        == f"row 9 of `{data}` needs 33 positions in `actor_train` (33 tokens); model `actor` has 32"
    )
