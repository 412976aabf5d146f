"""`data` and `call` nodes as a worker runs them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from hflow.graph.ir import Function, Input, Node, Output, Ref
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.runtime.engines.protocol import EngineCall, NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.rows import Rows, from_lists, from_padded, from_strings
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.tools.new_model import ALPHABET, character_tokenizer

TOKENIZER = Tokenizer(character_tokenizer(ALPHABET), eos_id=1, pad_id=0)
BATCH, GROUP = Factor("batch", 6, "prompts"), Factor("group", 3, "rollout")
RESP = Dim((Factor("resp", 8, "rollout"),), ragged=True)
PROMPT, SEQ = (Dim((Factor(name, 32, "prompts"),), ragged=True) for name in ("prompt", "seq"))
ANSWERS = Dim((Factor("resp", 8, "prompts"),), ragged=True)


def call(node: Node, rows: tuple[int, int], step: int = 0, evaluation: bool = False) -> EngineCall:
    plan = NodePlan(node.name, node.op, None, "python", Mesh.of((0,)), 1, 0.0, 0.0, 0)
    return EngineCall(node, plan, rows[0], rows[1] - rows[0], seed=7, step=step, evaluation=evaluation)


# data ------------------------------------------------------------------------------------------


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
    with pytest.raises(NodeError, match="all 8 rows .* are too long"):
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


# call ------------------------------------------------------------------------------------------

ROWS = Dim((BATCH, GROUP))
PROMPTS = Dim((BATCH,))
SCORES = ValueType("f32", (ROWS,))
TEXTS = ValueType("str", (ROWS,))
LOGPROBS = ValueType("f32", (ROWS, RESP))

FILE = """
import torch

def match(*, text, answer):
    assert len(text) == len(answer) and all(len(group) == 3 for group in text)
    return [[float(t == a) for t in group] for group, a in zip(text, answer)]

def normalise(*, score, scale=1.0):
    return scale * (score - score.mean(dim=1, keepdim=True))

def halve(*, logprobs, mask):
    assert logprobs.shape == mask.shape
    return logprobs * mask / 2, logprobs.sum(-1)

def shout(*, text):
    return [t.upper() for t in text]

def transpose(*, score):
    return score.T

def doubles(*, score):
    return score.double()

def counts(*, score):
    return score.long()

def divide(*, score):
    return 1 / score - 1 / score.clamp(max=2)

def logs(*, logprobs):
    return logprobs.log(), logprobs.sum(-1)

def per_prompt(*, score):
    return score.prod(-1) / score.sum(-1)

def fail(*, score):
    raise RuntimeError("no luck")

def move(*, score, level):
    assert level.shape == ()
    return score.mean() + level

def weigh(*, values, mask):
    return values[:, None] * mask if values.dim() == 1 else values * mask

def mixed(*, score):
    return score.amax(1) > score.amin(1)

def overwrite(*, score, level, logprobs):
    for tensor in (score, level, logprobs):
        tensor += 1
    return score, score, level, level, logprobs, logprobs

def add_first(*, score, level):
    score += 1
    return score, level

TABLE = torch.zeros(6)

def count_up(*, score):
    TABLE.add_(1)
    return TABLE.view(2, 3)

def spread(*, score):
    return score[0].expand(len(score))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FILE)
    return file


def call_node(
    reference: str,
    signature: str,
    inputs: Mapping[str, ValueType],
    outputs: Mapping[str, ValueType],
    **options: Any,
) -> Node:
    return Node(
        "mine",
        "call",
        function=Function(reference, signature, options={"scale": 1.0}),
        inputs=tuple(Input(port, Ref("rollout", port), type_) for port, type_ in inputs.items()),
        outputs=tuple(Output(port, type_) for port, type_ in outputs.items()),
        options=options,
    )


def score_node(file: Path, name: str, dtype: str = "f32", **options: Any) -> Node:
    made = ValueType("i32" if dtype == "i32" else "f32", (ROWS,))
    signature = f"score: f32[prompts*group] -> out: {dtype}[prompts*group]"
    return call_node(f"{file}:{name}", signature, {"score": SCORES}, {"out": made}, **options)


def execute(node: Node, inputs: Mapping[str, Rows], rows: tuple[int, int]) -> Result:
    return PythonEngine({}).run(call(node, rows), inputs)


def test_a_product_dim_arrives_as_two(file: Path) -> None:
    signature = "text: str[rows*k], answer: str[rows] -> score: f32[rows*k]"
    types = {"text": TEXTS, "answer": ValueType("str", (PROMPTS,))}
    node = call_node(f"{file}:match", signature, types, {"score": SCORES})
    texts, answers = ["1", "2", "3", "é", "5", "é"], ["2", "é"]
    result = execute(node, {"text": from_strings(texts), "answer": from_strings(answers)}, (0, 6))
    assert result.outputs["score"].values.tolist() == [0, 1, 0, 1, 0, 1]
    assert result.metrics == {"score": (3.0, 6.0)}


def test_groups_are_whole_on_every_worker_and_options_reach_the_function(file: Path) -> None:
    node = score_node(file, "normalise", scale=2.0)
    scores = torch.arange(18, dtype=torch.float32) ** 2
    whole = execute(node, {"score": Rows(scores)}, (0, 18)).outputs["out"].values
    parts = [
        execute(node, {"score": Rows(scores[a:b])}, (a, b)).outputs["out"].values
        for a, b in ((0, 6), (6, 18))
    ]
    expected = [2 * (s - sum(g) / 3) for g in scores.reshape(6, 3).tolist() for s in g]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.tolist() == pytest.approx(expected, abs=1e-4)  # float32, terms of up to 289


def test_ragged_values_keep_their_lengths_through_a_function(file: Path) -> None:
    signature = (
        "logprobs: f32[rows, resp~], mask: bool[rows, resp~] -> half: f32[rows, resp~], total: f32[rows]"
    )
    types = {"logprobs": LOGPROBS, "mask": ValueType("bool", (ROWS, RESP))}
    node = call_node(f"{file}:halve", signature, types, {"half": LOGPROBS, "total": SCORES})
    lengths = torch.tensor([2, 0, 3])
    logprobs = from_padded(-torch.arange(1.0, 10.0).reshape(3, 3), lengths)
    mask = from_lists([[1] * n for n in lengths.tolist()], torch.bool)
    out = execute(node, {"logprobs": logprobs, "mask": mask}, (0, 3))
    assert out.outputs["half"].values.tolist() == [-0.5, -1.0, -3.5, -4.0, -4.5]
    assert out.outputs["half"].lengths is not None and out.outputs["half"].lengths.tolist() == [2, 0, 3]
    assert out.outputs["total"].values.tolist() == [-3.0, 0.0, -24.0]
    assert out.metrics == {"total": (-27.0, 3.0)}, "only f32[rows] values have a mean"


SCALAR = ValueType("f32", ())


def test_scalars_enter_and_leave_without_dims(file: Path) -> None:
    signature = "score: f32[rows], level: f32[] -> level: f32[]"
    types = {"score": SCORES, "level": SCALAR}
    node = call_node(f"{file}:move", signature, types, {"level": SCALAR})
    inputs = {"score": Rows(torch.tensor([1.0, 2, 6])), "level": Rows(torch.tensor([10.0]))}
    result = execute(node, inputs, (0, 3))
    assert result.outputs["level"].values.tolist() == [13.0] and result.outputs["level"].lengths is None
    assert result.metrics == {"level": (13.0, 1.0)}
    error = refused(node, {**inputs, "level": Rows(torch.tensor([torch.inf]))}, (0, 3))
    assert (error.code, error.message) == ("HF405", "step 0: `level` is inf")
    node = replace(node, inputs=node.inputs[::-1], outputs=(Output("level", SCORES),))
    node = replace(
        node, function=Function(f"{file}:move", signature.replace("-> level: f32[]", "-> level: f32[rows]"))
    )
    assert "has shape [], declared is [rows=3]" in refused(node, inputs, (0, 3)).message


def test_a_function_may_write_into_its_inputs_and_return_them(file: Path) -> None:
    names = ("score: f32[rows]", "level: f32[]", "logprobs: f32[rows, resp~]")
    made = ", ".join(name.replace(":", f"{n}:") for name in names for n in (1, 2))
    given = {"score": SCORES, "level": SCALAR, "logprobs": LOGPROBS}
    types = {f"{port}{n}": type_ for port, type_ in given.items() for n in (1, 2)}
    node = call_node(f"{file}:overwrite", f"{', '.join(names)} -> {made}", given, types)
    inputs = {
        "score": Rows(torch.zeros(3)),
        "level": Rows(torch.zeros(1)),
        "logprobs": Rows(torch.zeros(3), torch.ones(3, dtype=torch.int64)),
    }
    outputs = execute(node, inputs, (0, 3)).outputs
    assert all(rows.values.eq(0).all() for rows in inputs.values())
    assert all(rows.values.eq(1).all() for rows in outputs.values())
    values = [rows.values for rows in (*inputs.values(), *outputs.values())]
    assert len({v.untyped_storage().data_ptr() for v in values}) == len(values) == 9


def test_two_inputs_of_one_value_are_two_tensors(file: Path) -> None:
    signature = "score: f32[rows], level: f32[rows] -> score: f32[rows], level: f32[rows]"
    types = {"score": SCORES, "level": SCORES}
    node = call_node(f"{file}:add_first", signature, types, types)
    shared = Rows(torch.ones(3))
    outputs = execute(node, {"score": shared, "level": shared}, (0, 3)).outputs
    assert outputs["score"].values.tolist() == [2, 2, 2] and outputs["level"].values.tolist() == [1, 1, 1]


def test_what_a_function_keeps_is_not_what_it_gave_away(file: Path) -> None:
    node, inputs = score_node(file, "count_up"), {"score": Rows(torch.ones(6))}
    first, second = (execute(node, inputs, (0, 6)).outputs["out"].values for _ in range(2))
    assert (second - first).tolist() == [1.0] * 6


def test_outputs_are_contiguous_as_those_that_have_moved(file: Path) -> None:
    signature = "score: f32[rows] -> out: f32[rows]"
    node = call_node(f"{file}:spread", signature, {"score": SCORES}, {"out": SCORES})
    out = execute(node, {"score": Rows(torch.arange(2.0, 8.0))}, (0, 6)).outputs["out"].values
    assert out.tolist() == [2.0] * 6 and out.is_contiguous()


def test_a_value_may_be_per_row_or_per_token_where_the_signature_says_so(file: Path) -> None:
    signature = "values: f32[rows, resp~?], mask: bool[rows, resp~] -> out: f32[rows, resp~]"
    mask = from_lists([[1, 0], [], [1, 1, 1]], torch.bool)
    lengths = torch.tensor([2, 0, 3])
    given = {
        "row": (SCORES, Rows(torch.tensor([2.0, 3, 4])), [2, 0, 4, 4, 4]),
        "token": (LOGPROBS, Rows(torch.arange(1.0, 6), lengths), [1, 0, 3, 4, 5]),
    }
    for type_, values, expected in given.values():
        types = {"values": type_, "mask": ValueType("bool", (ROWS, RESP))}
        node = call_node(f"{file}:weigh", signature, types, {"out": LOGPROBS})
        out = execute(node, {"values": values, "mask": mask}, (0, 3)).outputs["out"]
        assert out.values.tolist() == expected and torch.equal(out.lengths, lengths)  # type: ignore[arg-type]


def test_a_truth_value_per_group(file: Path) -> None:
    signature = "score: f32[prompts*group] -> keep: bool[prompts]"
    types = {"keep": ValueType("bool", (PROMPTS,))}
    node = call_node(f"{file}:mixed", signature, {"score": SCORES}, types)
    result = execute(node, {"score": Rows(torch.tensor([1.0, 1, 1, 0, 1, 1]))}, (12, 18))
    assert result.outputs["keep"].values.tolist() == [False, True] and result.metrics == {}


def test_strings_come_back(file: Path) -> None:
    node = call_node(f"{file}:shout", "text: str[rows] -> loud: str[rows]", {"text": TEXTS}, {"loud": TEXTS})
    out = execute(node, {"text": from_strings(["ab", "", "ß"])}, (0, 3)).outputs["loud"]
    assert out.strings() == ["AB", "", "SS"]


def test_a_wider_float_is_narrowed_to_the_declared_dtype(file: Path) -> None:
    out = execute(score_node(file, "doubles"), {"score": Rows(torch.ones(6))}, (0, 6)).outputs["out"]
    assert out.values.dtype == torch.float32


def refused(node: Node, inputs: Mapping[str, Rows], rows: tuple[int, int]) -> NodeError:
    with pytest.raises(NodeError) as caught:
        execute(node, inputs, rows)
    return caught.value


@pytest.mark.parametrize(("zero_at", "first_row"), [(0, 0), (4, 0), (2, 12)])
def test_a_number_that_is_not_finite_is_refused_with_its_global_row(
    file: Path, zero_at: int, first_row: int
) -> None:
    scores = torch.ones(6)
    scores[zero_at] = 0
    error = refused(score_node(file, "divide"), {"score": Rows(scores)}, (first_row, first_row + 6))
    assert (error.node, error.code) == ("mine", "HF405")
    assert error.message == f"step 0: `out` of row {first_row + zero_at} is nan"


def test_a_ragged_value_that_is_not_finite_is_refused_with_its_row_and_padding_is_not_looked_at(
    file: Path,
) -> None:
    signature = "logprobs: f32[rows, resp~] -> logs: f32[rows, resp~], total: f32[rows]"
    types = {"logs": LOGPROBS, "total": SCORES}
    node = call_node(f"{file}:logs", signature, {"logprobs": LOGPROBS}, types)
    lengths = torch.tensor([2, 0, 3, 1])
    values = torch.arange(1.0, 7.0)
    assert execute(node, {"logprobs": Rows(values, lengths)}, (6, 10)).outputs["logs"].values[0] == 0
    values[2] = 0
    error = refused(node, {"logprobs": Rows(values, lengths)}, (6, 10))
    assert error.message == "step 0: `logs` of row 8 is -inf"


def test_rows_of_groups_are_counted_in_groups(file: Path) -> None:
    signature = "score: f32[prompts*group] -> mean: f32[prompts]"
    types = {"mean": ValueType("f32", (PROMPTS,))}
    node = call_node(f"{file}:per_prompt", signature, {"score": SCORES}, types)
    scores = torch.tensor([1.0, 1, 1, 0, 0, 0])
    assert refused(node, {"score": Rows(scores)}, (12, 18)).message == "step 0: `mean` of row 5 is nan"


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("transpose", "f32", r"`out` has shape \[3, 2\], declared is \[prompts=2, group=3\]"),
        ("doubles", "i32", r"`out` is of dtype torch.float64, which i32 cannot hold"),
        ("fail", "f32", r"mine.py:\d+: RuntimeError: no luck"),
        ("missing", "f32", "missing"),
    ],
)
def test_a_function_that_breaks_its_signature_is_named(
    file: Path, name: str, dtype: str, message: str
) -> None:
    with pytest.raises(NodeError, match=message) as caught:
        execute(score_node(file, name, dtype), {"score": Rows(torch.ones(6))}, (0, 6))
    assert caught.value.node == "mine"
    assert caught.value.code == ("HF205" if name == "missing" else "HF401")
