"""Data nodes: which rows are drawn, by whom, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from hflow.graph.ir import Node, Output
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.rows import Rows
from tests.data.python_engine import ANSWERS, BATCH, PROMPT, SEQ, TOKENIZER, call


def dataset(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"meta": {"sum": f"{a} + {a % 7}"}, "answer": a + a % 7} for a in range(count)]


def data_node(source: str, **options: Any) -> Node:
    dims = Dim((BATCH,))
    defaults = {
        "dataset": source,
        "batch": 6,
        "prompt": "{{ meta.sum }} = ",
        "response": "{{ answer }}",
        "tokenizer": "actor",
        "shuffle": True,
        "holdout": 4,
        "size": 4096,
        "options": {},
        "max_prompt_tokens": 32,
        "max_response_tokens": 8,
    }
    types = {
        "prompt": ValueType("i32", (dims, PROMPT)),
        "tokens": ValueType("i32", (dims, SEQ)),
        "mask": ValueType("bool", (dims, ANSWERS)),
        "answer": ValueType("str", (dims,)),
    }
    outputs = tuple(Output(port, type_) for port, type_ in types.items())
    return Node("prompts", "data", outputs=outputs, options={**defaults, **options})


def draw(node: Node, *args: Any, **kwargs: Any) -> Result:
    return PythonEngine({"actor": TOKENIZER}).run(call(node, *args, **kwargs), {})


def lists(rows: Rows) -> list[list[int]]:
    assert rows.lengths is not None
    return [part.tolist() for part in torch.split(rows.values, rows.lengths.tolist())]


def test_the_columns_of_a_row_belong_together(tmp_path: Path) -> None:
    out = draw(data_node(dataset(tmp_path, sums(30))), (0, 6)).outputs
    prompts, tokens, masks = lists(out["prompt"]), lists(out["tokens"]), lists(out["mask"])
    for prompt, row, mask, answer in zip(prompts, tokens, masks, out["answer"].strings()):
        text = TOKENIZER.decode([prompt])[0]
        left, right = text.removesuffix(" = ").split(" + ")
        assert int(left) + int(right) == int(answer)
        assert row == [*prompt, *TOKENIZER.encode([answer])[0], TOKENIZER.eos_id]
        assert mask == [True] * (len(answer) + 1)
    assert out["tokens"].values.dtype == torch.int32 and out["mask"].values.dtype == torch.bool


def test_the_parts_of_many_workers_are_the_whole(tmp_path: Path) -> None:
    node = data_node(dataset(tmp_path, sums(30)))
    whole = lists(draw(node, (0, 6), step=9).outputs["tokens"])
    parts = [lists(draw(node, rows, step=9).outputs["tokens"]) for rows in ((0, 1), (1, 4), (4, 6))]
    assert [row for part in parts for row in part] == whole


def test_held_out_prompts_are_never_drawn_in_training_even_as_duplicates(tmp_path: Path) -> None:
    engine = PythonEngine({"actor": TOKENIZER})
    node = data_node(dataset(tmp_path, sums(30) * 3))
    held_out = replace(node, options={**node.options, "batch": 4})
    aside = lists(engine.run(call(held_out, (0, 4), evaluation=True), {}).outputs["prompt"])
    trained = [
        prompt
        for step in range(20)
        for prompt in lists(engine.run(call(node, (0, 6), step), {}).outputs["prompt"])
    ]
    assert len(aside) == 4 and len({tuple(p) for p in trained}) == 26
    assert not {tuple(p) for p in aside} & {tuple(p) for p in trained}


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*sums(20), *({"meta": {"sum": "9" * 40}, "answer": 1} for _ in range(3))]
    result = draw(data_node(dataset(tmp_path, rows), batch=16), (0, 16))
    assert result.metrics["dropped_rows"] == (3, 1.0)
    assert int(result.outputs["prompt"].lengths.max()) <= 32  # type: ignore[union-attr]
    assert "dropped_rows" not in draw(data_node(dataset(tmp_path, sums(20))), (0, 6)).metrics


def test_too_few_rows_are_refused_with_where_the_others_went(tmp_path: Path) -> None:
    rows = [*sums(20), *sums(5), *({"meta": {"sum": "9" * 40}, "answer": 1} for _ in range(3))]
    origin = "of 28 in the source; duplicates: 5, too long: 3"
    expected = rf"16 rows to train on \({origin}, held out: 4\), a batch needs 17"
    with pytest.raises(NodeError, match=expected):
        draw(data_node(dataset(tmp_path, rows), batch=17), (0, 17))
    with pytest.raises(NodeError, match=rf"20 distinct prompts \({origin}\); holding out 20 leaves none"):
        draw(data_node(dataset(tmp_path, rows), holdout=20), (0, 6))


def test_the_end_of_sequence_counts_as_a_response_token(tmp_path: Path) -> None:
    source = dataset(tmp_path, [{"meta": {"sum": str(i)}, "answer": "123"} for i in range(8)])
    draw(data_node(source, holdout=0, max_response_tokens=4), (0, 6))
    lengths = "prompts have 4 tokens, max_prompt_tokens is 32; "
    lengths += "responses, with end of sequence, have 4 tokens, max_response_tokens is 3"
    with pytest.raises(NodeError, match=f"all 8 rows .* are too long.*{lengths}"):
        draw(data_node(source, holdout=0, max_response_tokens=3), (0, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{{ quest }}"}, "no field `quest`.*prompt template"),
        ({"prompt": "{{ answr }}"}, r"did you mean `answer`\?"),
        ({"response": "{{ meta.total }}"}, "row 0 .* response template.*total"),
        ({"prompt": "{{ answer / 0 }}"}, "row 0 .* ZeroDivisionError"),
        ({"prompt": "{{ ''.__class__.__mro__ }}"}, "row 0 .* no attribute '__class__'"),
        ({"prompt": "{{ answer * 10**8 * 'a' }}"}, "row 1 .* more than 10000000 characters"),
        ({"response": "{{ range(9) | random }}"}, "response template .* no filter `random`"),
        ({"prompt": "caf\u00e9 {{ answer }}"}, "row 0 .*, prompt: .*no token for 'é' in 'café 0'"),
        ({"response": "{% if answer == 6 %}\u00e9{% endif %}"}, "row 3 .*, response: .* no token for 'é'"),
        ({"prompt": ""}, "row 0 .* empty prompt"),
        ({"batch": 27}, "26 rows to train on"),
        ({"holdout": 30}, "leaves none"),
        ({"dataset": "nowhere.jsonl"}, "no file `nowhere.jsonl`"),
    ],
)
def test_what_cannot_be_read_names_row_and_field(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    node = data_node(dataset(tmp_path, sums(30)), **options)
    with pytest.raises(NodeError, match=message) as caught:
        draw(node, (0, 6))
    assert caught.value.code == "HF403" and caught.value.node == "prompts"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "no text but bool"),
        (float("nan"), "nan, no finite number"),
        (float("-inf"), "-inf, no finite number"),
        ([1, float("nan")], "no text but list, which JSON cannot write: Out of range"),
    ],
)
def test_a_field_that_is_no_text_is_refused(tmp_path: Path, value: Any, kind: str) -> None:
    rows = [{**row, "answer": value} for row in sums(30)]
    with pytest.raises(NodeError, match=f"row 0 .* field `answer` is {kind}"):
        draw(data_node(dataset(tmp_path, rows), response="1"), (0, 6))


def test_lists_and_mappings_become_json_with_sorted_keys(tmp_path: Path) -> None:
    rows = [{**row, "answer": {"z": [row["answer"], "é"], "a": None}} for row in sums(30)]
    out = draw(data_node(dataset(tmp_path, rows), response="1"), (0, 6)).outputs
    for prompt, text in zip(lists(out["prompt"]), out["answer"].strings()):
        left, right = TOKENIZER.decode([prompt])[0].removesuffix(" = ").split(" + ")
        assert json.loads(text) == {"a": None, "z": [int(left) + int(right), "é"]}
        assert text.startswith('{"a": null, "z"')


def source_of(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "jsonl":
        return dataset(folder, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, "null"), (float("nan"), "nan, no finite number"), (float("inf"), "inf, no finite number")],
)
@pytest.mark.parametrize(
    "template",
    [
        "{{ hint }}=",
        "{{ hint ~ '=' }}",
        "{{ [hint] | join }}",
        "{{ hint | string }}",
        "{{ '%s' | format(hint) }}",
    ],
)
def test_a_template_that_writes_what_is_no_text_is_refused(
    tmp_path: Path, kind: str, value: Any, problem: str, template: str
) -> None:
    """Jinja would write `None` and `nan`."""
    rows = [{**row, "hint": 0.5 if number != 7 else value} for number, row in enumerate(sums(30))]
    node = data_node(source_of(tmp_path, kind, rows), prompt=template)
    with pytest.raises(NodeError, match=rf"row 7 of `.*`, prompt template: field `hint` is {problem}"):
        draw(node, (0, 6))


def test_bytes_are_no_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, "parquet", [{**row, "hint": b"1+1"} for row in sums(30)])
    with pytest.raises(NodeError, match="row 0 .* field `hint` is bytes, no text"):
        draw(data_node(source, prompt="{{ hint }}"), (0, 6))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if meta.hint %}{{ meta.hint }}{% else %}no{% endif %}", "no"),
        ("{{ 'no' if meta.hint is none else meta.hint }}", "no"),
        ("{{ meta.hint | default('no') }}", "no"),
        ("{{ 'no' if meta.hint == none else meta.hint }}", "no"),
        ("{{ 'yes' if meta.hint != none else 'no' }}", "no"),
        ("{{ meta.hints | select('none') | list | length }}", "1"),
        ("{{ meta | tojson }}", '{"hint": null, "hints": ["a", null]}'),
    ],
)
def test_a_template_may_ask_whether_there_is_a_value(tmp_path: Path, template: str, text: str) -> None:
    rows = [{"answer": i, "meta": {"hint": None, "hints": ["a", None]}} for i in range(30)]
    node = data_node(dataset(tmp_path, rows), prompt=f"{{{{ answer }}}}:{template}", max_prompt_tokens=50)
    for prompt, answer in zip(lists((out := draw(node, (0, 6)).outputs)["prompt"]), out["answer"].strings()):
        assert TOKENIZER.decode([prompt])[0] == f"{answer}:{text}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ meta.hint }}", "field `meta.hint` is null"),
        ("{{ meta.hints }}", r"field `meta.hints\[1\]` is null"),
        ("{{ meta }}", "field `meta.hint` is null"),
        ("{{ meta.hints | join }}", r"field `meta.hints\[1\]` is null"),
        ("{% for hint in meta.hints %}{{ hint }}{% endfor %}", r"field `meta.hints\[1\]` is null"),
        ("{{ meta.get('nothing') }}", "a null would be written"),
        ("{{ meta.hint + 1 }}", "field `meta.hint` is null"),
    ],
)
def test_what_is_no_text_inside_a_field_is_refused(tmp_path: Path, template: str, problem: str) -> None:
    rows = [{"answer": i, "meta": {"hint": None, "hints": ["a", None]}} for i in range(30)]
    with pytest.raises(NodeError, match=f"row 0 of .*, prompt template: {problem}"):
        draw(data_node(dataset(tmp_path, rows), prompt=template), (0, 6))


def test_numbers_that_are_not_finite_are_no_json(tmp_path: Path) -> None:
    rows = [{"answer": i, "meta": {"sum": float("nan")}} for i in range(30)]
    with pytest.raises(NodeError, match="row 0 of .*: field `meta.sum` is nan"):
        draw(data_node(dataset(tmp_path, rows), prompt="{{ meta | tojson }}"), (0, 6))


def test_rows_of_one_prompt_with_other_answers_are_kept_and_every_row_left_out_is_counted(
    tmp_path: Path,
) -> None:
    """20 prompts with two answers each, and everything twice; without templates of responses, that is the
    dataset of a graph that samples its responses."""
    rows = [{**row, "answer": row["answer"] + more} for row in sums(20) for more in (0, 100)]
    node = data_node(dataset(tmp_path, rows * 2), response=None, holdout=0, batch=40)
    node = replace(node, outputs=tuple(o for o in node.outputs if o.port in ("prompt", "answer")))
    result = draw(node, (0, 40))
    drawn = Counter(zip(map(tuple, lists(result.outputs["prompt"])), result.outputs["answer"].strings()))
    assert len(drawn) == 40 and len({prompt for prompt, _ in drawn}) == 20
    assert result.metrics == {"duplicate_rows": (40, 1.0)}
    held_out = replace(node, options={**node.options, "holdout": 4, "batch": 32})
    counts = {
        "duplicate_rows": (40, 1.0),
        "set_aside_rows": (4, 1.0),
    }  # the other answer to each held-out prompt
    assert draw(held_out, (0, 32)).metrics == counts
    with pytest.raises(NodeError, match="duplicates: 40, too long: 0, held out: 4, of a held-out prompt: 4"):
        draw(replace(held_out, options={**held_out.options, "batch": 33}), (0, 33))


def pair_node(source: str, **options: Any) -> Node:
    """Three responses to each of six prompts."""
    rows = Dim((BATCH, Factor("pair", 3, "prompts")))
    types = {
        "answer": ValueType("str", (Dim((BATCH,)),)),
        "tokens": ValueType("i32", (rows, SEQ)),
        "mask": ValueType("bool", (rows, ANSWERS)),
    }
    responses = ["{{ answer }}", "no", "{{ answer }}!"]
    node = data_node(source, **{"response": responses, **options})
    return replace(node, outputs=tuple(Output(port, type_) for port, type_ in types.items()))


def test_several_responses_of_a_row_are_rows_one_after_the_other(tmp_path: Path) -> None:
    node = pair_node(dataset(tmp_path, sums(30)))
    out = draw(node, (2, 6), step=4).outputs
    answers, masks = out["answer"].strings(), lists(out["mask"])
    texts = TOKENIZER.decode(lists(out["tokens"]))
    assert (len(answers), len(texts)) == (4, 12)
    for i, answer in enumerate(answers):
        prompts, found = zip(*(text.split(" = ") for text in texts[3 * i : 3 * i + 3]))
        assert len(set(prompts)) == 1 and found == (answer, "no", f"{answer}!")
        assert [len(m) for m in masks[3 * i : 3 * i + 3]] == [len(response) + 1 for response in found]
    whole = draw(node, (0, 6), step=4).outputs
    assert torch.equal(whole["tokens"].slice(6, 18).values, out["tokens"].values)


def test_a_row_with_one_response_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    long = "{% if answer == 9 %}123456789{% endif %}"
    result = draw(pair_node(dataset(tmp_path, sums(30)), response=["1", long, "2"]), (0, 6))
    assert result.metrics["dropped_rows"] == (1, 1.0)


def test_the_response_that_fails_is_numbered(tmp_path: Path) -> None:
    node = pair_node(dataset(tmp_path, sums(30)), response=["1", "é", "2"])
    with pytest.raises(NodeError, match="row 0 of .*, response 1: .* no token for 'é'"):
        draw(node, (0, 6))
