"""Types of reward models: numbers per row and per response, scores that are trained, losses per group."""

from __future__ import annotations

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.evaluation import evaluation_graph
from hflow.graph.infer.functions import FunctionSource
from hflow.graph.infer.kinds.train import loss_problem
from hflow.graph.infer.signature import parse_signature
from hflow.graph.ir import Graph
from hflow.graph.load import load, load_text


def changed(more: str, name: str = "reward_model") -> Graph:
    return load_text(f"hflow: 1\nextends: {name}\nname: changed\n{more}", "changed.yaml")


def problems(more: str, name: str = "reward_model") -> list[str]:
    with pytest.raises(HflowError) as error:
        changed(more, name)
    return [f"{d.code} {d.message}" for d in error.value.diagnostics]


NUMBERS = """
nodes:
  pairs:
    with: {numbers: {gap: 0.5, tie: "{{ 0 }}"}}
    out: {gap: "f32[batch]", tie: "f32[batch]"}
  reward_train: {in: {margins: pairs.gap, tie: pairs.tie}, with: {tie_threshold: 0.3}}
"""


def test_a_reward_model_is_trained_on_its_score() -> None:
    function = load("reward_model").node("reward_train").function
    assert function and function.trained == ("score",)
    assert [i.port for i in load("reward_model").node("reward_train").inputs] == ["tokens", "mask"]


def test_a_loss_over_pairs_reads_a_number_of_each() -> None:
    train = changed(NUMBERS).node("reward_train")
    assert {i.port: str(i.type) for i in train.inputs} == {
        "tokens": "i32[batch*pair, seq~]",
        "mask": "bool[batch*pair, resp~]",
        "margins": "f32[batch]",
        "tie": "f32[batch]",
    }


def test_evaluation_measures_pairs_of_held_out_prompts() -> None:
    evaluation = evaluation_graph(load("reward_model"))
    assert evaluation and [n.name for n in evaluation.nodes] == ["pairs", "judged", "agreement"]
    assert [n.rows for n in evaluation.nodes] == [1024, 1024, 512]


def test_labels_of_responses_are_rows_as_their_tokens() -> None:
    graph = load("cost_model")
    sign = graph.node("cost_train").input("sign")
    assert sign and str(sign.type) == "f32[batch*pair]" and sign.type.rows == 256
    assert [m.name for m in graph.models] == ["cost"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("models: {reward: {head: lm}}", "HF222 `reward_train` computes `score` for its loss with `reward`"),
        (
            'nodes: {pairs: {out: {gap: "f32[batch*pair]"}}, reward_train: {in: {margins: pairs.gap}}}',
            "HF209 `margins` takes one value per prompt (`pairs`) and",
        ),
        ('nodes: {pairs: {with: {response: x}, out: {tokens: "i32[batch, seq~]", '
         'mask: "bool[batch, resp~]"}}}', "HF209"),
        ("nodes: {reward_train: {with: {tie_threshold: 0.3}}}", "HF207 `tie_threshold: 0.3`"),
        ("nodes: {reward_train: {with: {aggregate: sequence_mean}}}", "HF212 `aggregate` has no effect"),
        ("nodes: {pairs: {with: {numbers: {gap: 1}}}}", "HF212 `numbers.gap` has no effect"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(more: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(more)), problems(more)


def test_a_loss_of_ones_own_reads_a_score_per_row() -> None:
    def problem(text: str) -> str | None:
        return loss_problem(FunctionSource("mine", parse_signature(text), ()))

    assert problem("score: f32[rows]<trained>, target: f32[rows] -> loss: f32[rows]") is None
    assert "as `f32[rows]`" in str(problem("score: f32[rows, resp~]<trained> -> loss: f32[rows]"))
    assert "as `f32[rows, resp~]`" in str(problem("values: f32[rows]<trained> -> loss: f32[rows]"))
    assert problem("score: f32[p*k]<trained>, m: f32[p] -> loss: f32[p]") is None
    assert "numbers per row, per group" in str(problem("score: f32[p*k]<trained>, m: f32[k] -> loss: f32[p]"))
