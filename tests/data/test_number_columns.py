"""Columns of numbers: a field of the row or a template, of the row or of each of its responses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hflow.graph.ir import Node, Output
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.engines.protocol import NodeError
from tests.data.python_engine import BATCH
from tests.data.test_data_nodes import data_node, dataset, draw, lists

PAIR = Factor("pair", 2, "prompts")


def rows(count: int = 12, **fields: Any) -> list[dict[str, Any]]:
    """Row i compares i with -i - 1; its gap is i / 4, and its signs are i and -i."""
    return [{"q": f"q{i}", "a": i, "b": -i - 1, "gap": i / 4, "sign": [i, -i]} | fields for i in range(count)]


def node(source: str, **options: Any) -> Node:
    pairs = Dim((BATCH, PAIR))
    types = {
        "tokens": ValueType("i32", (pairs, Dim((Factor("seq", 32, "prompts"),), ragged=True))),
        "gap": ValueType("f32", (Dim((BATCH,)),)),
        "sign": ValueType("f32", (pairs,)),
        "a": ValueType("str", (Dim((BATCH,)),)),
    }
    outputs = tuple(Output(port, type_) for port, type_ in types.items())
    given = {"prompt": "{{ q }}", "response": ["{{ a }}", "{{ b }}"], "holdout": 2} | options
    return replace(data_node(source, **given), outputs=outputs)


def test_fields_are_numbers_of_the_row_and_of_its_responses(tmp_path: Path) -> None:
    out = draw(node(dataset(tmp_path, rows())), (0, 6)).outputs
    numbers = [int(text) for text in out["a"].strings()]
    assert out["gap"].values.tolist() == [i / 4 for i in numbers]
    assert out["sign"].values.tolist() == [s for i in numbers for s in (i, -i)]
    assert out["sign"].lengths is None and len(lists(out["tokens"])) == len(out["sign"]) == 12


def test_templates_and_numbers_stand_for_fields(tmp_path: Path) -> None:
    numbers = {"gap": "{{ a - b }}", "sign": [1, "{{ -1 if a > 3 else 0.5 }}"]}
    out = draw(node(dataset(tmp_path, rows(gap=None, sign="?")), numbers=numbers), (0, 6)).outputs
    drawn = [int(text) for text in out["a"].strings()]
    assert out["gap"].values.tolist() == [2 * i + 1 for i in drawn]
    assert out["sign"].values.tolist() == [s for i in drawn for s in (1, -1 if i > 3 else 0.5)]


def test_workers_and_evaluations_read_their_own_rows(tmp_path: Path) -> None:
    whole = node(dataset(tmp_path, rows()))
    all_ = draw(whole, (0, 6)).outputs["sign"].values.tolist()
    parts = [draw(whole, part).outputs["sign"].values.tolist() for part in ((0, 2), (2, 6))]
    assert parts[0] + parts[1] == all_
    held_out = draw(replace(whole, options={**whole.options, "batch": 2}), (0, 2), evaluation=True).outputs
    assert not {abs(s) for s in held_out["sign"].values.tolist()} & {abs(s) for s in all_}


def test_rows_that_differ_in_a_number_are_two(tmp_path: Path) -> None:
    twice = [*rows(), *rows(gap=9.0)]
    assert "duplicate_rows" not in draw(node(dataset(tmp_path, twice)), (0, 6)).metrics
    assert draw(node(dataset(tmp_path, [*rows(), *rows()])), (0, 6)).metrics["duplicate_rows"][0] == 12.0


@pytest.mark.parametrize(
    ("fields", "options", "problem"),
    [
        ({"gap": None}, {}, "row 0 of `{}`: `gap` is None, no finite number"),
        ({"gap": True}, {}, "`gap` is True, no finite number"),
        ({"gap": "1"}, {}, "`gap` is '1', no finite number"),
        ({"gap": 1e39}, {}, "`gap` is 1e+39, no finite number"),
        ({"sign": [1]}, {}, "`sign` is a list of 1, not 2 numbers"),
        ({"sign": 1}, {}, "`sign` is int, not 2 numbers"),
        ({"sign": [1, "x"]}, {}, "`sign` is 'x', no finite number"),
        ({}, {"numbers": {"gap": "{{ q }}"}}, "`gap` is 'q0', no finite number"),
        ({}, {"numbers": {"gap": "nan"}}, "`gap` is nan, no finite number"),
        ({}, {"numbers": {"gap": "{{ missing }}"}}, "which the number `gap` template asks for"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    source = dataset(tmp_path, rows(**fields))
    with pytest.raises(NodeError, match=re.escape(problem.format(source))) as error:
        draw(node(source, **options), (0, 6))
    assert error.value.code == "HF403"


def test_a_missing_field_is_named_with_a_similar_one(tmp_path: Path) -> None:
    renamed = [{("gaps" if k == "gap" else k): v for k, v in row.items()} for row in rows()]
    with pytest.raises(NodeError, match="has no field `gap`"):
        draw(node(dataset(tmp_path, renamed)), (0, 6))
