"""Help says what to write, and where: a mistake is often made elsewhere than it is noticed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.infer.signature import parse_ports
from hflow.graph.infer.unify import Argument, unify
from hflow.graph.load import check_text
from hflow.graph.types import Dim, Factor, ValueType
from hflow.runtime.controller.worker_failure import WorkerFailure

GRAPH = """\
hflow: 1
name: small
params: {rows: 8}
models:
  actor: {path: models/tiny}
loop: {name: step, times: 3}
nodes:
  examples:
    op: data
    with: {dataset: d.jsonl, batch: 8, prompt: "{{ q }}", response: "{{ a }}"}
    out: {tokens: "i32[batch, seq~]", mask: "bool[batch, resp~]"}
  train:
    op: train
    model: actor
    loss: hflow.ops.losses.negative_log_likelihood
    in: {tokens: examples.tokens}
    with: {lr: 1e-4}
    repeat: {minibatch: "${ rows }"}
"""
REPEAT = '    repeat: {minibatch: "${ rows }"}'


def found(text: str, *overrides: str) -> Diagnostic:
    """The one problem of a graph."""
    with pytest.raises(HflowError) as caught:
        check_text(text, "graph.yaml", overrides)
    (problem,) = caught.value.diagnostics
    return problem


def edited(old: str, new: str) -> str:
    assert old in GRAPH
    return GRAPH.replace(old, new)


def test_the_graph_is_right() -> None:
    assert check_text(GRAPH, "graph.yaml")[1] == ()


INTEGER = "with a point or an exponent it is no integer"
WIRE = "write it under `in`; in Python, give an output of a node, not a text"
NEAREST = "the nearest that fit: 2 and 4"
WITH = "options of a node stand under `with`: `with: {clip_grad: 0.5}`"
OPS = "needs an op; ops: data, generate, score, train, call, repeat"
INHERITED = "one that the file inherits is removed by `size: null`"
SPACE = "put a space after the colon: `tokens: examples.tokens`"


@pytest.mark.parametrize(
    ("old", "new", "help_"),
    [
        ("times: 3", "times: rows", 'if `rows` is a param, write `"${ rows }"`'),
        ("hflow.ops.losses.neg", "neg", "did you mean `hflow.ops.losses.negative_log_likelihood`?"),
        ("rows: 8", "rows: 3", f"{NEAREST}; `rows` is set at graph.yaml:3"),
        ("rows: 8", "rows: 4e0", f"write `4`: {INTEGER}; `rows` is set at graph.yaml:3"),
        ("times: 3", "times: 1e3", f"write `1000`: {INTEGER}"),
        ("models/tiny}", "models/tiny, frozen: yes}", "write `true`: in YAML 1.2, `yes` is a text"),
        ("dataset: d.jsonl", "dataset: d.jsonl, shuffle: no", "write `false`: in YAML 1.2, `no` is a text"),
        ("lr: 1e-4", 'lr: "1e-4"', "a number stands without quotes"),
        ("{tokens: examples.tokens}", "{tokens:examples.tokens}", SPACE),
        ("in: {tokens: examples.tokens}", "in: tokens:examples.tokens", SPACE),
        ("  train:\n", "  train\n", "a key is followed by a colon and a space"),
        ("lr: 1e-4", "lr: 1e-4, mask: examples.mask", f"`mask` is an input: {WIRE}"),
        ("    with: {lr: 1e-4}\n", "    with: {lr: 1e-4}\n    clip_grad: 0.5\n", WITH),
        ("  train:\n", "  trian: {with: {lr: 1e-5}}\n  train:\n", f"did you mean `train`? A new node {OPS}"),
        ("dataset: d.jsonl", "dataset: d.jsonl, size: 8", f"remove it; {INHERITED}"),
        ("lr: 1e-4", "lr: 1e-4, reward: examples.mask", f"`examples.mask` names a value: {WIRE}"),
    ],
)
def test_help(old: str, new: str, help_: str) -> None:
    assert found(edited(old, new)).help == help_


def test_a_param_set_on_the_command_line_is_said_to_be() -> None:
    problem = found(GRAPH, "params.rows=3")
    assert problem.code == "HF219" and problem.help == f"{NEAREST}; `rows` is set by `--set params.rows=3`"
    assert problem.span and problem.span.line == GRAPH.splitlines().index(REPEAT) + 1


@pytest.mark.parametrize("param, help_", [("num_generations", "in hflow: `n` of `generate`"), ("mine", "")])
def test_a_param_of_another_library_is_told_ours(param: str, help_: str) -> None:
    (warning,) = check_text(edited("rows: 8", f"rows: 8, {param}: 4"), "graph.yaml")[1]
    assert warning.code == "HF227" and (help_ in warning.help if help_ else "hflow" not in warning.help)


def test_an_evaluation_of_no_rows() -> None:
    text = Path("algorithms/grpo.yaml").read_text()
    with pytest.raises(HflowError) as caught:
        check_text(text, "grpo.yaml", ["params.holdout=0"])
    assert caught.value.diagnostics[0].help.startswith("without evaluation: `eval: null`")


def test_an_algorithm_is_not_looked_for_in_folders_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HflowError, match="`grpo` alone means hflow's own"):
        hflow.load("algorithms/grpo.yaml")
    Path("mine.yaml").write_text("hflow: 1\nextends: algorithms/grpo.yaml\nname: mine\n")
    with pytest.raises(HflowError, match="`extends: grpo` is hflow's own"):
        hflow.load("mine.yaml")


def test_an_empty_node_is_shown_on_its_own_line() -> None:
    problem = found(edited("  train:\n", "  idle:\n  train:\n"))
    assert problem.code == "HF103" and problem.span == Span("graph.yaml", 12, 3, 7)


def test_an_advantage_is_first_of_all_no_loss() -> None:
    text = edited("losses.negative_log_likelihood", "advantages.group_normalise")
    assert "a loss returns `loss: f32[rows, resp~]`" in found(text).message


def test_a_signature_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('TEXT = "a: f32[rows] -> b: f32[rows]"\n@op(TEXT)\ndef f(a): ...\n')
    problem = found(edited("hflow.ops.losses.negative_log_likelihood", f"{tmp_path}/mine.py:f"))
    assert (problem.code, problem.message) == ("HF206", "the signature of `f` must be a string literal")


BATCH, GROUP = Factor("batch", 16, "prompts"), Factor("group", 4, "rollout")
PROMPTS, SAMPLES = ValueType("str", (Dim((BATCH,)),)), ValueType("str", (Dim((BATCH, GROUP)),))


@pytest.mark.parametrize("ports", ["text: str[p*k], answer: str[p]", "answer: str[p], text: str[p*k]"])
def test_values_of_prompts_and_of_samples_are_told_apart(ports: str) -> None:
    """Both values have the same rows, and that is wrong: one of them is per prompt."""
    values = {"text": Argument(SAMPLES, "rollout.text"), "answer": Argument(SAMPLES, "other.text")}
    (mismatch,) = unify(parse_ports(ports), values)[1]
    assert mismatch.code == "HF209"
    assert "`answer` takes one value per prompt (`p`) and `text` one per sample (`p*k`)" in mismatch.message
    assert mismatch.message.count("has `batch*group` of `prompts`, `rollout`") == 2
    assert mismatch.help == "with this `text`, `answer` must have `batch` of `prompts`"


def test_a_signature_without_groups_gets_help_to_name_them() -> None:
    values = {"a": Argument(SAMPLES, "rollout.text"), "b": Argument(PROMPTS, "prompts.answer")}
    (mismatch,) = unify(parse_ports("a: str[rows], b: str[rows]"), values)[1]
    assert mismatch.help.endswith("`rows` and `rows*k`")


def test_an_error_shows_place_and_help(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(edited("rows: 8", "rows: 3"))
    with pytest.raises(hflow.HflowError) as caught:
        hflow.load(file)
    assert str(caught.value).splitlines() == [
        "error[HF219]: minibatch 3 does not divide the 8 rows of `train`",
        f"   --> {file}:18:25",
        f"18 | {REPEAT}",
        "   |                         ^^^^^^^^^^^",
        f"   = help: {NEAREST}; `rows` is set at {file}:3",
    ]


def test_an_error_of_the_builder_shows_the_python_line() -> None:
    g = hflow.GraphBuilder("small", steps=1)
    g.model("actor", path="models/tiny", head="sclar")  # type: ignore[arg-type]
    with pytest.raises(hflow.HflowError, match='g.model."actor", path="models/tiny", head="sclar".'):
        g.graph()


@pytest.mark.parametrize("file", ["/nowhere/graph.yaml", "--set params.rows=3", "\0", "<text>"])
def test_an_error_can_always_be_shown_and_sent(file: str) -> None:
    problem = Diagnostic("HF219", "no", Span(file, 1, 1, 5), "help")
    for error in (HflowError(problem), HflowError([problem, problem]), WorkerFailure(problem, "trace")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.diagnostics, again.args) == (type(error), error.diagnostics, error.args)
        assert str(again) == str(error) and "help" in str(error)
    assert ("1 | params.rows=3" in str(HflowError(problem))) == file.startswith("--set")


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (
            "ref_logprobs",
            "a frozen model of its own that takes them over: `refresh: {from: actor",
        ),
        ("rollout", "the compiler schedules `lag: 1`, and no more; then `max_lag: 1` in `actor_train`"),
    ],
)
def test_who_wants_weights_five_updates_old_is_told_what_there_is(node: str, wanted: str) -> None:
    with pytest.raises(HflowError) as caught:
        hflow.load("grpo", f"nodes.{node}.model={{use: actor, lag: 5}}")
    found = caught.value.diagnostics[0]
    assert found.code == "HF223" and wanted in found.help


def test_a_frozen_model_may_take_over_older_weights() -> None:
    """What the help proposes."""
    hflow.load("grpo", ["models.ref.refresh={from: actor, every: 5}"])
