"""What the data node of a named evaluation takes over from the step's, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from hflow.graph.infer.kinds.data_options import SOURCE_OPTIONS
from hflow.graph.ir import Node
from hflow.graph.load import load_text
from hflow.graph.row_sources import OF_A_SOURCE, overlap

STEP = "dataset: org/name, config: main, split: train, revision: v1, filter: a < 3, rename_columns: {q: p}"


def evaluated(data: str, step: str = STEP, prompt: str = 'prompt: "{{ question }}"') -> tuple[Node, Node]:
    """The data node of the step, and the one of the evaluation."""
    said = f"data: {{{data}}}" if data else ""
    graph = load_text(
        f"""\
hflow: 1
extends: parents/grpo.yaml
name: changed
evaluations:
  test:
    rows: 4
    {said}
    metrics: {{score: reward.score}}
nodes:
  prompts:
    with: {{{step}, {prompt}, holdout: 4, curriculum: {{by: level, steps: 5}}}}
""",
        "tests/bad/changed.yaml",
    )
    return graph.node("prompts"), graph.evaluations[0].nodes[0]


def test_another_dataset_has_nothing_that_is_said_of_the_one_of_the_step() -> None:
    step, own = evaluated("dataset: other.jsonl")
    assert {*OF_A_SOURCE} - {"size", "options"} <= step.options.keys()
    assert {*OF_A_SOURCE, "curriculum"} & own.options.keys() == {"size", "options"}
    assert (own.options["size"], own.options["options"]) == (4096, {})
    assert own.options["prompt"] == step.options["prompt"]


def test_another_split_of_the_dataset_keeps_the_rest() -> None:
    step, own = evaluated("split: test")
    changed: dict[str, Any] = {"split": "test", "batch": 4, "holdout": 0, "shuffle": False}
    expected = {**step.options, **changed}
    del expected["curriculum"]
    assert own.options == expected


def test_held_out_rows_are_of_the_same_options() -> None:
    """So that they are read once; their order is that of the hashes, whatever the curriculum."""
    step, own = evaluated("")
    assert own.options == {**step.options, "batch": 4}


def test_null_takes_away_what_the_node_says() -> None:
    _, own = evaluated('dataset: other.jsonl, prompt: null, user: "{{ q }}", config: null')
    assert own.options["user"] == "{{ q }}"
    assert own.options["prompt"] is None and "config" not in own.options
    _, own = evaluated("split: test, filter: null")
    assert "filter" not in own.options and own.options["config"] == "main"


def test_the_functions_of_filters_are_found_beside_the_file() -> None:
    said = 'dataset: other.jsonl, filter: "./functions.py:easy"'
    step, own = evaluated(said, step='dataset: rows.jsonl, filter: "./functions.py:easy"')
    assert own.options["filter"] == step.options["filter"] == "./tests/bad/functions.py:easy"


def test_all_keys_of_a_source_are_said_of_it() -> None:
    assert {*OF_A_SOURCE} == {o.name for o in SOURCE_OPTIONS} - {"path", "name", "weight"}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, "within"),
        ({"rename_columns": {"a": "b"}}, "beyond"),
        ({"options": {"terms": 2}}, "beyond"),
        ({"filter": "x < 2"}, "beyond"),
        ({"size": 10}, "beyond"),
        ({"size": 30}, "within"),
    ],
)
def test_rows_that_are_told_otherwise_are_others(other: dict[str, Any], expected: str) -> None:
    own = {"dataset": "reasoning-gym/sums", "size": 20}
    assert overlap(own, {**own, **other}) == expected
