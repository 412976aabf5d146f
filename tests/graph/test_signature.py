from __future__ import annotations

import pytest
from hypothesis import given, settings

from hflow.graph.infer.signature import Port, Signature, parse_signature
from hflow.graph.types import Dim, Factor, ValueType, parse_type
from tests.graph.strategies import patterns, signatures

ROWS, RESP = Dim((Factor("rows"),)), Dim((Factor("resp"),), ragged=True)


@given(patterns())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_types_round_trip(type_: ValueType) -> None:
    assert parse_type(str(type_)) == type_


@given(signatures())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_signatures_round_trip(signature: Signature) -> None:
    assert parse_signature(str(signature)) == signature


def test_what_a_signature_says() -> None:
    text = " logprobs:f32[rows,resp~]<trained>,\n bonus? : f32 [ rows ] -> loss: f32[rows, resp~] "
    signature = parse_signature(text)
    per_token = ValueType("f32", (ROWS, RESP))
    assert signature.inputs == (
        Port("logprobs", per_token, "trained"),
        Port("bonus", ValueType("f32", (ROWS,)), optional=True),
    )
    assert signature.outputs == (Port("loss", per_token),)
    canonical = "logprobs: f32[rows, resp~]<trained>, bonus?: f32[rows] -> loss: f32[rows, resp~]"
    assert str(signature) == canonical


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: f32[rows]", "has the form"),
        ("-> a: f32[rows]", "expected `name: type`"),
        ("a: f32[rows] ->", "expected `name: type`"),
        ("a: f32[rows], -> b: f32[rows]", "expected `name: type`"),
        ("a: f32[rows] b: f32[rows] -> c: f32[rows]", "expected `,`"),
        ("a: f32[rows], a: f32[rows] -> c: f32[rows]", "occurs twice"),
        ("a: f64[rows] -> b: f32[rows]", "unknown dtype `f64`"),
        ("a: f32[rows?] -> b: f32[rows]", "only the last dim"),
        ("a: f32[rows] -> b: f32[rows, resp~?]", "`b` cannot have `?`"),
        ("a: f32[resp~] -> b: f32[resp~]", "must be its rows"),
        ("a: f32[rows, word~] -> b: f32[rows]", "unknown ragged dim `word~`"),
        ("a: f32[k*k] -> b: f32[k]", "one name twice"),
        ("a: f32[rows*resp~] -> b: f32[rows]", "a ragged dim has one name"),
        ("a: f32[rows]<fresh> -> b: f32[rows]", "unknown tag `<fresh>`"),
        ("a: f32[rows] -> b?: f32[rows]", "`b` cannot have `?`"),
        ("a: f32[rows] -> b: f32[rows]<scored>", "only `<mixed>` is said of outputs"),
        ("a: f32[rows]<mixed> -> b: f32[rows]", "`a` is an input"),
        ("a: f32[rows] -> b: f32[]<mixed>", "no effect at output `b`"),
        ("a: f32[rows] -> b: bool[rows]<mixed>", "no effect at output `b`"),
        ("a: f32[rows] -> b: f32[groups]", "dim `groups` of output `b`"),
        ("a: f32[rows], c?: f32[rows, resp~] -> b: f32[rows, resp~]", "dim `resp~` of output `b`"),
        ("a: f32[resp] -> b: f32[resp, resp~]", "dim `resp~` of output `b`"),
    ],
)
def test_refused_signatures(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="(?s).") as caught:
        parse_signature(text)
    assert part in str(caught.value)
