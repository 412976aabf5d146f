"""Filters, mixtures and curricula of whole data nodes: which rows are drawn, of those that were written."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.expression import Expression
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine, apart
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.run import left_out
from tests.data.python_engine import TOKENIZER, call
from tests.data.test_data_nodes import data_node, dataset, draw, lists

ROWS: list[dict[str, Any]] = [
    {"meta": {"sum": f"{a} + 0"}, "answer": str(a), "level": a % 5, "hint": None if a % 3 else "x"}
    for a in range(60)
]


def answers(result: Result) -> list[str]:
    return result.outputs["answer"].strings()


def all_drawn(node: Any, engine: PythonEngine, steps: int) -> list[str]:
    return [a for step in range(steps) for a in answers(engine.run(call(node, (0, 6), step), {}))]


def engine() -> PythonEngine:
    return PythonEngine({"actor": TOKENIZER})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("level < 3 and hint is none", True),
        ("meta.sum | length + level", 7),
        ("answer in ['1', '2']", True),
        ("hint == none", True),
        ("-level", -2),
        ("level / 4", 0.5),
        ("'x' if level else 'y'", "x"),
        ("answer.startswith('1')", False),
        ("meta['sum'].split(' ')[0] | int", 2),
    ],
)
def test_an_expression_gives_the_value_that_python_would(text: str, value: Any) -> None:
    from hflow.graph.templates.null_field import guarded

    row = {"meta": {"sum": "2 + 0"}, "answer": "2", "level": 2, "hint": None}
    found = Expression(text).value(guarded(row))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("level <", "nexpected"),
        ("{{ level < 3 }}", "without `{{ }}`"),
        ("level < 3 level", "does not belong there"),
        ("lipsum()", "no function `lipsum`"),
        ("answer | random", "no filter `random`"),
        ("range(10**9) | list", "operations"),
        ("answer.__class__", "__class__"),
        ("hint + 1", "field `hint` is null"),
        ("nothing.at_all", "nothing"),
    ],
)
def test_an_expression_is_bounded_and_knows_its_row_alone(text: str, message: str) -> None:
    from hflow.graph.templates.null_field import guarded

    with pytest.raises(BadTemplateError) as caught:
        Expression(text).value(guarded({"answer": "2", "level": 2, "hint": None}))
    assert message in f"{caught.value} {caught.value.help}"


def test_a_filter_keeps_what_it_says_and_the_rest_is_counted(tmp_path: Path) -> None:
    node = data_node(dataset(tmp_path, ROWS), holdout=0, filter="level < 2 and hint is not none")
    kept = {row["answer"] for row in ROWS if row["level"] < 2 and row["hint"] is not None}
    result = draw(node, (0, 6))
    assert result.metrics["filtered_rows"] == (60 - len(kept), 1.0)
    assert set(all_drawn(node, engine(), 20)) <= kept
    said = {f"prompts.{name}": total for name, (total, _) in result.metrics.items()}
    assert left_out(said) == {"prompts": {"filtered": 60 - len(kept)}}, "as summary.json says it"
    assert "filtered_rows" not in draw(data_node(dataset(tmp_path, ROWS), holdout=0), (0, 6)).metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter": "level"}, "row 0 of .*: filter `level` gives `0` .int., no truth value"),
        ({"filter": "levle < 2"}, "no field `levle`.*did you mean `level`"),
        ({"filter": "level < 0"}, "the filter leaves none of the 60 rows"),
        ({"filter": "hint.x < 2"}, "row 0 of .*, filter: "),
        ({"filter": "level == 0", "batch": 13}, "of 60 in the source; .*filtered: 48, .* a batch needs 13"),
        ({"curriculum": {"by": "answer"}}, "row 0 of .*: `by` of the curriculum gives `0` .str., no finite"),
        ({"curriculum": {"by": "hint | length"}}, "row 1 of .*, curriculum: "),
    ],
)
def test_a_bad_filter_names_the_row(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeError, match=message) as caught:
        draw(data_node(dataset(tmp_path, ROWS), **{"holdout": 0, **options}), (0, 6))
    assert caught.value.code == "HF403"


@pytest.mark.slow
def test_a_function_filters_here_and_in_a_process_of_its_own(tmp_path: Path) -> None:
    reference = "./tests/data/filters.py:odd_and_short"
    node = data_node(dataset(tmp_path, ROWS), holdout=0, batch=2, filter=reference)
    assert apart(node) == (reference,)
    expected = {row["answer"] for row in ROWS if row["level"] % 2 == 1 and len(row["answer"]) == 1}
    process = FunctionProcess([reference], threading.Event())
    try:
        for here in (engine(), PythonEngine({"actor": TOKENIZER}, process)):
            drawn = [a for step in range(2) for a in answers(here.run(call(node, (0, 2), step), {}))]
            assert set(drawn) == expected == {"1", "3", "6", "8"}
    finally:
        process.end()


@pytest.mark.slow
def test_a_function_that_ends_its_process_ends_the_node(tmp_path: Path) -> None:
    reference = "./tests/data/filters.py:crash"
    process = FunctionProcess([reference], threading.Event())
    try:
        with pytest.raises(NodeError, match="exit code 7") as caught:
            PythonEngine({"actor": TOKENIZER}, process).open(
                data_node(dataset(tmp_path, ROWS), filter=reference)
            )
        assert caught.value.code == "HF401" and caught.value.node == "prompts"
    finally:
        process.end()


def test_fields_that_a_function_cannot_have_are_named(tmp_path: Path) -> None:
    rows = [*ROWS[:3], {**ROWS[3], "level": 1.5}]
    with pytest.raises(HflowError, match=r"row 3 of .*field `level` is `1.5` .float., which i64 cannot hold"):
        engine().open(data_node(dataset(tmp_path, rows), filter="./tests/data/filters.py:odd_and_short"))


def mixed(folder: Path, **options: Any) -> Any:
    """Sums of a and 0 with answers below 60, and products with answers from 100 on, some of them too long."""
    (folder / "sums").mkdir(exist_ok=True)
    entries: list[Mapping[str, Any]] = [
        {"path": dataset(folder / "sums", ROWS), "name": "sums", "weight": 2, "filter": "level > 0"},
        {"path": str(folder / "products.jsonl"), "rename_columns": {"product": "answer"}},
    ]
    rows = [{"meta": {"sum": f"{a} * 1"}, "product": str(100 + a), "level": 0} for a in range(30)]
    rows += [{"meta": {"sum": "9" * 40}, "product": "1", "level": 0}]
    (folder / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data_node("", **{"dataset": entries, "holdout": 5, **options})


def test_a_mixture_draws_by_weight_and_says_so(tmp_path: Path) -> None:
    node, here = mixed(tmp_path), engine()
    result = here.run(call(node, (0, 6)), {})
    assert result.metrics["rows.sums"] == (4.0, 1.0) and result.metrics["rows.products"] == (2.0, 1.0)
    assert result.metrics["dropped_rows"] == (1.0, 1.0) and result.metrics["filtered_rows"] == (12.0, 1.0)
    whole = lists(result.outputs["tokens"])
    parts = [lists(here.run(call(node, rows), {}).outputs["tokens"]) for rows in ((0, 1), (1, 4), (4, 6))]
    assert [row for part in parts for row in part] == whole, "of any number of workers"
    drawn = Counter(all_drawn(node, here, 12))
    assert sum(n for a, n in drawn.items() if int(a) >= 100) == 24
    held_out = answers(here.run(call(mixed(tmp_path, batch=5), (0, 5), evaluation=True), {}))
    assert not set(held_out) & set(drawn) and len(set(held_out)) == 5


def test_templates_and_columns_know_the_source(tmp_path: Path) -> None:
    from dataclasses import replace

    from hflow.graph.ir import Output

    prompt = "{{ meta.sum }} {% if source == 'sums' %}={% else %}:{% endif %}"
    node = mixed(tmp_path, prompt=prompt)
    node = replace(node, outputs=(*node.outputs, Output("source", node.type_of("answer"))))
    result = draw(node, (0, 6))
    texts = TOKENIZER.decode(lists(result.outputs["prompt"]))
    sources = result.outputs["source"].strings()
    assert Counter(sources) == {"sums": 4, "products": 2}
    assert [text[-1] for text in texts] == ["=" if source == "sums" else ":" for source in sources]


def test_a_row_that_two_sources_have_counts_once(tmp_path: Path) -> None:
    file = dataset(tmp_path, ROWS)
    entries = [{"path": file, "name": "a", "filter": "level < 4"}, {"path": file, "name": "b"}]
    result = draw(data_node("", dataset=entries, holdout=0), (0, 6))
    assert result.metrics["duplicate_rows"] == (48.0, 1.0)
    assert result.metrics["filtered_rows"] == (12.0, 1.0)


def test_a_curriculum_of_a_node_begins_with_easy_rows(tmp_path: Path) -> None:
    node = data_node(dataset(tmp_path, ROWS), holdout=0, curriculum={"by": "level", "steps": 5, "start": 0.2})
    here = engine()
    first = answers(here.run(call(node, (0, 6), 0), {}))
    assert {int(a) % 5 for a in first} == {0}, "12 of 60 rows have level 0"
    assert {int(a) % 5 for a in all_drawn(node, here, 15)} == {0, 1, 2, 3, 4}
    plain = data_node(dataset(tmp_path, ROWS), holdout=0)
    later = [answers(here.run(call(node, (0, 6), step), {})) for step in (5, 6)]
    assert later == [answers(draw(plain, (0, 6), step=step)) for step in (0, 1)], "then the usual passes"
