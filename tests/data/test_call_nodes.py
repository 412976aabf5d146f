"""Call nodes: how values enter a function, and what it may give back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hflow.graph.ir import Function, Input, Node, Output, Ref
from hflow.graph.types import Dim, ValueType
from hflow.runtime.engines.protocol import NodeError, Result
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.engines.python.function_process import FunctionProcess
from hflow.runtime.rows import Rows, from_lists, from_padded, from_strings
from tests.data.python_engine import BATCH, GROUP, RESP, call

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


ENGINES: list[PythonEngine] = []


@pytest.fixture(params=["here", pytest.param("apart", marks=pytest.mark.slow)], scope="module", autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs its functions in this process, and in one of theirs."""
    process = FunctionProcess([], threading.Event()) if request.param == "apart" else None
    ENGINES[:] = [PythonEngine({}, process)]
    yield
    if process:
        process.end()


def execute(node: Node, inputs: Mapping[str, Rows], rows: tuple[int, int]) -> Result:
    return ENGINES[0].run(call(node, rows), inputs)


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
