from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.graph.source.document import Scalar, parse
from hflow.graph.source.expressions import ExpressionError, evaluate, substitute

PARAMS: dict[str, Scalar] = {"batch": 128, "group": 8, "lr": 1e-4, "big": True, "model": "models/tiny"}

NUMBERS = st.sampled_from(["batch", "group", "lr", "3", "0.5", "0", "7"])
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda p: f"({p[0]} {p[1]} {p[2]})"
        ),
        inner.map(lambda e: f"(-{e})"),
        st.tuples(inner, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), inner, inner, inner).map(
            lambda p: f"({p[3]} if {p[0]} {p[1]} {p[2]} else {p[4]})"
        ),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS.filter(lambda e: len(e) <= 200))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_arithmetic_is_pythons(expression: str) -> None:
    try:
        expected = eval(expression, {"__builtins__": {}}, dict(PARAMS))
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            evaluate(expression, PARAMS)
        return
    found = evaluate(expression, PARAMS)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("model", "models/tiny"),
        ("batch * group // 2", 512),
        ("2 ** 10", 1024),
        ("'a' if model == 'models/tiny' else 'b'", "a"),
        ("batch if big and not (group > 8) else 1", 128),
        ("true", True),
    ],
)
def test_values(expression: str, value: Scalar) -> None:
    assert evaluate(expression, PARAMS) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "batch +",
        "batch group",
        "batch }} {{ group",
        "batch.real",
        "batch['real']",
        "model.upper()",
        "batch | abs",
        "model ~ 'x'",
        "range(3)",
        "[1, 2]",
        "{'a': 1}",
        "(1, 2)",
        "batch is defined",
        "'a' in model",
        "batch if big",
        "none",
        "'a' * 10",
        "'%1000000000d' % 1",
        "9 ** 9 ** 9 ** 9",
        "9.0 ** 1000",
        "1 / 0",
        "model < 1",
        "-model",
        "(" * 99 + "1" + ")" * 99,
        "1" + " + 1" * 100,
    ],
)
def test_refused_expressions(expression: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(expression, PARAMS)


@pytest.mark.parametrize("name", ["result", "loop", "super", "context", "environment", "range"])
def test_any_param_name_can_be_read(name: str) -> None:
    assert evaluate(f"{name} + 1", {name: 2}) == 3


def test_an_unknown_name_is_reported_where_its_scalar_stands() -> None:
    document, problems, failed = substitute(parse('params: {batch: 8}\nx: {y: ["${ batsh }"]}\n', "x"))
    (problem,) = problems
    assert (problem.code, problem.help) == ("HF104", "did you mean `batch`?")
    assert problem.span and (problem.span.line, problem.span.column) == (2, 9)
    assert failed == (("x", "y", 0),)
    assert document.plain()["x"] == {"y": ["${ batsh }"]}


def test_values_keep_their_kind_and_place() -> None:
    text = 'params: {n: 2, on: false}\na: "${ n * 4 }"\nb: ["${ on }", "plain"]\n'
    document, problems, _ = substitute(parse(text, "x"))
    assert not problems
    assert document.plain() == {"params": {"n": 2, "on": False}, "a": 8, "b": [False, "plain"]}
    assert document.span(("a",)).column == 4
