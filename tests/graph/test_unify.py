from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hflow.graph.infer.signature import Port, Signature, parse_ports
from hflow.graph.infer.unify import Argument, Bindings, unify
from hflow.graph.types import Dim, Factor, Provenance, ValueType
from tests.graph.strategies import signatures

BATCH, GROUP = Factor("batch", 16, "prompts"), Factor("group", 4, "rollout")
ONE = Factor("group", 1, "rollout")


def rows(*factors: Factor) -> Dim:
    return Dim(factors)


def ragged(name: str, origin: str = "rollout") -> Dim:
    return Dim((Factor(name, 32, origin),), ragged=True)


def codes(ports: str, **types: ValueType) -> dict[str, str]:
    """The mismatch of each port, `actor` being trained."""
    values = {name: Argument(t, f"{name}.out") for name, t in types.items()}
    return {m.port: m.code for m in unify(parse_ports(ports), values, "actor")[1]}


def test_a_product_takes_the_last_factor_apart() -> None:
    text = ValueType("str", (rows(BATCH, GROUP),))
    answer = ValueType("str", (rows(BATCH),))
    values = {"text": Argument(text, "rollout.text"), "answer": Argument(answer, "prompts.answer")}
    bound, mismatches = unify(parse_ports("text: str[rows*k], answer: str[rows]"), values)
    assert not mismatches
    assert bound.rows == {"rows": (BATCH,), "k": (GROUP,)}
    (score,) = parse_ports("score: f32[rows*k]")
    assert bound.apply(score.type) == ValueType("f32", (rows(BATCH, GROUP),))


def test_three_factors_keep_the_outer_two_together() -> None:
    inner = Factor("group", 2, "second")
    score = ValueType("f32", (rows(BATCH, GROUP, inner),))
    bound, mismatches = unify(parse_ports("score: f32[a*b]"), {"score": Argument(score, "x.score")})
    assert not mismatches
    assert bound.rows == {"a": (BATCH, GROUP), "b": (inner,)}


def test_one_sample_per_prompt_pairs_with_its_prompt() -> None:
    one, none = ValueType("f32", (rows(BATCH, ONE),)), ValueType("f32", (rows(BATCH),))
    assert codes("a: f32[rows], b: f32[rows]", a=none, b=one) == {}
    assert codes("a: f32[rows*k]", a=one) == {}
    bound, _ = unify(
        parse_ports("a: f32[rows], b: f32[rows]"), {"a": Argument(none, "a"), "b": Argument(one, "b")}
    )
    assert bound.rows["rows"] == (BATCH, ONE)  # the group stays, so that a later product can match


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"a": ValueType("i32", (rows(BATCH),))}, {"a": "HF208"}),
        ({"a": ValueType("f32", (rows(BATCH), ragged("resp")))}, {"a": "HF208"}),
        ({"b": ValueType("f32", (rows(BATCH),))}, {"b": "HF208"}),
        ({"b": ValueType("f32", (rows(BATCH), ragged("seq")))}, {"b": "HF208"}),
        ({"b": ValueType("f32", (rows(BATCH), rows(GROUP)))}, {"b": "HF208"}),
        ({"c": ValueType("f32", (rows(BATCH),))}, {"c": "HF209"}),
        (
            {
                "a": ValueType("f32", (rows(BATCH),)),
                "b": ValueType("f32", (rows(BATCH, GROUP), ragged("resp"))),
            },
            {"b": "HF209"},
        ),
        (
            {
                "b": ValueType("f32", (rows(BATCH), ragged("resp"))),
                "d": ValueType("i32", (rows(BATCH), ragged("seq", "other"))),
            },
            {"d": "HF209"},
        ),
        (
            {
                "b": ValueType("f32", (rows(BATCH), ragged("resp"))),
                "e": ValueType("i32", (rows(BATCH), ragged("prompt", "prompts"))),
            },
            {},
        ),
    ],
)
def test_mismatches(types: dict[str, ValueType], expected: dict[str, str]) -> None:
    ports = "a: f32[rows], b: f32[rows, resp~], c: f32[rows*k], d: i32[rows, seq~], e: i32[rows, prompt~]"
    assert codes(ports, **types) == expected


@pytest.mark.parametrize(
    ("tag", "provenance", "code"),
    [
        ("behaviour", Provenance("actor", "behaviour"), None),
        ("behaviour", Provenance("actor", "behaviour", lag=1), None),
        ("behaviour", Provenance("actor", "scored"), "HF210"),
        ("behaviour", Provenance("ref", "behaviour"), "HF210"),
        ("behaviour", None, "HF210"),
        ("scored", Provenance("ref", "scored"), None),
        ("scored", Provenance("actor", "scored"), None),
        ("scored", Provenance("actor", "behaviour"), "HF210"),
        ("scored", None, "HF210"),
        ("old", Provenance("actor", "behaviour"), None),
        ("old", Provenance("actor", "scored"), None),
        ("old", Provenance("actor", "value"), "HF210"),
        ("old", Provenance("ref", "behaviour"), "HF210"),
        ("old", Provenance("ref", "scored"), "HF210"),
        ("old", None, "HF210"),
        ("value", Provenance("actor", "value"), None),
        ("value", Provenance("critic", "value"), "HF210"),
        ("value", Provenance("actor", "score"), "HF210"),
        ("value", Provenance("actor", "scored"), "HF210"),
        ("value", None, "HF210"),
        (None, None, None),
        (None, Provenance("critic", "score"), None),
        (None, Provenance("critic", "derived"), None),
        ("value", Provenance("actor", "derived"), "HF210"),
        ("old", Provenance("actor", "derived"), "HF210"),
        (None, Provenance("critic", "value"), "HF210"),
        (None, Provenance("actor", "scored"), "HF210"),
        (None, Provenance("actor", "behaviour"), "HF210"),
    ],
)
def test_provenance(tag: str | None, provenance: Provenance | None, code: str | None) -> None:
    value = ValueType("f32", (rows(BATCH), ragged("resp")), provenance)
    mark = f"<{tag}>" if tag else ""
    assert codes(f"a: f32[rows, resp~]{mark}", a=value).get("a") == code


def test_outside_a_train_node_values_of_any_model_will_do() -> None:
    value = ValueType("f32", (rows(BATCH), ragged("resp")), Provenance("critic", "value"))
    ports = parse_ports("a: f32[rows, resp~]<value>")
    bound, mismatches = unify(ports, {"a": Argument(value, "values.values")})
    assert not mismatches
    assert bound.made_by == {"a": Provenance("critic", "value")}


@pytest.mark.parametrize("dims", [(rows(BATCH),), (rows(BATCH), ragged("resp"))])
def test_an_optional_dim_is_there_or_not(dims: tuple[Dim, ...]) -> None:
    assert codes("a: f32[rows, resp~?]", a=ValueType("f32", dims)) == {}
    assert codes("a: f32[rows, resp~?]", a=ValueType("f32", ())) == {"a": "HF208"}
    assert codes("a: f32[rows, resp~?]", a=ValueType("f32", (rows(BATCH), ragged("seq")))) == {"a": "HF208"}


def test_scalars_are_no_rows() -> None:
    scalar, row = ValueType("f32", ()), ValueType("f32", (rows(BATCH),))
    assert codes("a: f32[], b: f32[rows]", a=scalar, b=row) == {}
    assert codes("a: f32[], b: f32[rows]", a=row, b=scalar) == {"a": "HF208", "b": "HF208"}


def test_both_models_are_named() -> None:
    value = ValueType("f32", (rows(BATCH), ragged("resp")), Provenance("ref", "scored"))
    ports = parse_ports("old: f32[rows, resp~]<behaviour>")
    (mismatch,) = unify(ports, {"old": Argument(value, "ref_logprobs.logprobs")}, "actor")[1]
    assert mismatch.message == (
        "`old` expects log-probs that `actor` sampled with, but `ref_logprobs.logprobs` was scored by `ref`"
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[Signature, dict[str, tuple[Factor, ...]], dict[str, Argument]]:
    """A signature without tags, factors for its dim names, and the values that they make of its inputs."""
    signature = draw(signatures())
    inputs = tuple(replace(p, tag=None) for p in signature.inputs)
    names = sorted({f.name for p in inputs for d in p.type.dims if not d.ragged for f in d.factors})
    leads = {p.type.dims[0].factors[0].name for p in inputs if p.type.dims}
    inner = {f.name for p in inputs for d in p.type.dims[:1] for f in d.factors[1:]}
    factors = {}
    for name in names:
        most = 1 if name in inner else 3  # only the first name of a product stands for several factors
        assert name in leads | inner
        sizes = draw(st.lists(st.integers(2, 9), min_size=1, max_size=most))
        factors[name] = tuple(Factor(f"{name}_{i}", size, "maker") for i, size in enumerate(sizes))
    texts = {n: ragged(n) for n in ("prompt", "resp", "seq")}
    bound = Bindings(factors, texts)
    values = {p.name: Argument(bound.apply(p.type), p.name) for p in inputs}
    return replace(signature, inputs=inputs), factors, values


@given(calls())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_values_made_of_a_signature_unify_with_it(
    call: tuple[Signature, dict[str, tuple[Factor, ...]], dict[str, Argument]],
) -> None:
    signature, factors, values = call
    bound, mismatches = unify(signature.inputs, values)
    assert not mismatches
    assert bound.rows == factors
    for port in signature.inputs:
        assert bound.apply(port.type) == values[port.name].type


@given(calls(), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rows_of_another_maker_never_unify(
    call: tuple[Signature, dict[str, tuple[Factor, ...]], dict[str, Argument]], data: st.DataObject
) -> None:
    signature, _, values = call
    port = data.draw(st.sampled_from([p for p in signature.inputs if p.type.dims]))
    others = [p for p in signature.inputs if p.name != port.name and p.type.dims]
    shared = {f.name for f in port.type.dims[0].factors}
    assume(any(shared & {f.name for f in p.type.dims[0].factors} for p in others))
    values[port.name] = foreign(port, values[port.name])
    _, mismatches = unify(signature.inputs, values)
    assert {m.code for m in mismatches} == {"HF209"}


def foreign(port: Port, value: Argument) -> Argument:
    first, *rest = value.type.dims
    strange = Dim(tuple(replace(f, origin="stranger") for f in first.factors))
    return replace(value, type=replace(value.type, dims=(strange, *rest)))


MADE = st.sampled_from(
    [None, *(Provenance(m, "derived", lag) for m in ("first", "second") for lag in (0, 2))]
)


@st.composite
def calls_with_values(draw: st.DrawFn) -> tuple[Signature, dict[str, Argument], list[Provenance]]:
    """A call of which some inputs were made from values of two models, and these origins in order."""
    signature, _, values = draw(calls())
    origins: list[Provenance] = []
    for port in signature.inputs:
        if (made := draw(MADE)) and port.numbers:
            values[port.name] = Argument(replace(values[port.name].type, provenance=made), port.name)
            origins.append(made)
    return signature, values, origins


@given(calls_with_values())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_outputs_belong_to_the_only_model_whose_values_entered(
    call: tuple[Signature, dict[str, Argument], list[Provenance]],
) -> None:
    signature, values, origins = call
    bound, mismatches = unify(signature.inputs, values, mixes=signature.mixes)
    models = {p.model for p in origins}
    if len(models) > 1 and not signature.mixes:
        strangers = [v for v in values.values() if (p := v.type.provenance) and p.model != origins[0].model]
        assert [(m.port, m.code) for m in mismatches] == [(v.source, "HF210") for v in strangers]
        return
    assert not mismatches
    made = Provenance(models.pop(), "derived", max(p.lag for p in origins)) if len(models) == 1 else None
    for port in signature.outputs:
        free = signature.mixes or not port.numbers
        assert bound.made(port) == replace(bound.apply(port.type), provenance=None if free else made)


@given(calls_with_values(), st.sampled_from(["first", "second", "third"]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_critic_takes_numbers_made_from_its_own_values_only(
    call: tuple[Signature, dict[str, Argument], list[Provenance]], critic: str
) -> None:
    signature, values, _ = call
    _, mismatches = unify(signature.inputs, values, critic, critic)
    foreign = [v.source for v in values.values() if (p := v.type.provenance) and p.model != critic]
    assert [(m.port, m.code) for m in mismatches] == [(source, "HF210") for source in foreign]
    assert not unify(signature.inputs, values, critic, critic, mixes=True)[1]
