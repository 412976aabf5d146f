"""Random types and signatures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from hflow.graph.infer.signature import Port, Signature, Tag
from hflow.graph.types import RAGGED_DIMS, Dim, DType, Factor, ValueType

DTYPES: st.SearchStrategy[DType] = st.sampled_from(get_args(DType))
NAMES = st.sampled_from(["rows", "k", "prompts", "group", "heads"])
PRODUCTS = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(lambda n: Dim(tuple(map(Factor, n))))
SCALAR = ValueType("f32", ())
RAGGED = st.sampled_from(RAGGED_DIMS).map(lambda n: Dim((Factor(n),), ragged=True))


@st.composite
def patterns(draw: st.DrawFn, rows: st.SearchStrategy[Dim] = PRODUCTS) -> ValueType:
    """A type with a row dim and at most one ragged dim."""
    return ValueType(draw(DTYPES), (draw(rows), *draw(st.lists(RAGGED, max_size=1))))


@st.composite
def inputs(draw: st.DrawFn) -> ValueType:
    """The type of an input: as `patterns`, or with a ragged dim that may lack, or a scalar."""
    type_ = draw(patterns())
    if draw(st.integers(0, 7)) == 0:
        return SCALAR
    rows, *texts = type_.dims
    return replace(type_, dims=(rows, *(replace(d, optional=draw(st.booleans())) for d in texts)))


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    types = [draw(patterns()), *draw(st.lists(inputs(), max_size=3))]
    tags: Any = st.sampled_from([None, None, *get_args(Tag)])
    ports = [Port(f"in{i}", t, draw(tags), i > 0 and draw(st.booleans())) for i, t in enumerate(types)]
    made = [p.type for p in ports if not p.optional and not any(d.optional for d in p.type.dims)]
    outputs = draw(st.lists(st.sampled_from([*made, SCALAR]), min_size=1, max_size=3))
    made_of = [Port(f"out{i}", t) for i, t in enumerate(outputs)]
    mixed = draw(st.booleans())
    return Signature(
        tuple(ports), tuple(replace(p, tag="mixed" if mixed and p.numbers else None) for p in made_of)
    )
