"""Which rows a data node's filters keep, and how hard its curriculum says they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hflow.diagnostics import did_you_mean
from hflow.graph.infer.functions import read_function
from hflow.graph.infer.signature import Port
from hflow.graph.ir import Function, Input, Node, Output, Ref
from hflow.graph.row_sources import filter_function
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.expression import Expression
from hflow.graph.templates.null_field import guarded, unwritable
from hflow.graph.types import Dim, Factor, ValueType
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.runtime.data_files import DataRow, refused
from hflow.runtime.engines.protocol import EngineCall, Result
from hflow.runtime.rows import TORCH_DTYPES, Rows, from_strings
from hflow.runtime.source_rows import SourceRows
from hflow.runtime.text_field import text_of

CHUNK = 4096  # rows that a function is given at once
_KINDS: Mapping[str, tuple[type, ...]] = {"i64": (int,), "f32": (int, float), "bool": (bool,)}
CallFunction = Callable[[EngineCall, Mapping[str, Rows]], Result]


def kept_rows(node: str, found: SourceRows, call_function: CallFunction) -> list[int]:
    """The numbers of the rows that fulfil all filters of their source, in order.

    Raises:
        HflowError: HF403 with the row when an expression fails or gives no truth value; HF205.
        NodeError: when a function fails.
    """
    numbers = list(range(len(found.rows)))
    for place, source in enumerate(found.sources):
        for text in source.filters:
            own = [n for n in numbers if found.of[n] == place]
            dropped = _dropped(node, text, found, own, call_function)
            numbers = [n for n in numbers if n not in dropped]
    return numbers


def difficulties(by: str, found: SourceRows, rows: Sequence[int]) -> list[float]:
    """How hard rows are: what an expression gives for each of them.

    Raises:
        HflowError: HF403 with the row when it fails or gives no finite number.
    """
    expression = _compiled("curriculum", by, found)
    values = [_value("curriculum", expression, found, row) for row in rows]
    for row, value in zip(rows, values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise refused(
                f"{found.where(row)}: `by` of the curriculum gives {_shown(value)}, no finite number"
            )
    return [float(value) for value in values]


def _dropped(
    node: str, text: str, found: SourceRows, rows: Sequence[int], call_function: CallFunction
) -> set[int]:
    if reference := filter_function(text):
        return _dropped_by_function(node, reference, found, rows, call_function)
    expression = _compiled("filter", text, found)
    dropped: set[int] = set()
    for row in rows:
        value = _value("filter", expression, found, row)
        if not isinstance(value, bool):
            help_ = "compare, as in `level < 3`, or test, as in `hint is not none`"
            raise refused(f"{found.where(row)}: filter `{text}` gives {_shown(value)}, no truth value", help_)
        if not value:
            dropped.add(row)
    return dropped


def _compiled(what: str, text: str, found: SourceRows) -> Expression:
    try:
        expression = Expression(text)
    except BadTemplateError as error:
        raise refused(f"the {what} `{text}` is no expression: {error}", error.help) from None
    for field in sorted(expression.fields - set(found.fields)):
        help_ = did_you_mean(field, found.fields, "fields")
        raise refused(f"rows have no field `{field}`, which the {what} `{text}` asks for", help_)
    return expression


def _value(what: str, expression: Expression, found: SourceRows, row: int) -> Any:
    try:
        return expression.value(guarded(found.rows[row]))
    except BadTemplateError as error:
        raise refused(f"{found.where(row)}, {what}: {error}", error.help) from None


def _shown(value: Any) -> str:
    return f"`{str(value)[:40]}` ({type(value).__name__})" if value is not None else "null"


def _dropped_by_function(
    node: str, reference: str, found: SourceRows, rows: Sequence[int], call_function: CallFunction
) -> set[int]:
    signature = read_function(reference, Path()).signature  # files are relative to where hflow runs
    dropped: set[int] = set()
    for first in range(0, len(rows), CHUNK):
        part = rows[first : first + CHUNK]
        dim = Dim((Factor("rows", len(part), node),))
        inputs = {port.name: _column(port, found, part) for port in signature.inputs}
        reads = tuple(
            Input(p.name, Ref(node, p.name), ValueType(p.type.dtype, (dim,))) for p in signature.inputs
        )
        (kept,) = signature.outputs
        made = Output(kept.name, ValueType("bool", (dim,)))
        called = Node(node, "call", None, Function(reference, str(signature)), reads, (made,))
        plan = NodePlan(node, "call", None, "python", Mesh.of((0,)), 1, 0.0, 0.0, 0)
        result = call_function(EngineCall(called, plan, 0, len(part), seed=0, step=0), inputs)
        dropped |= {row for row, keep in zip(part, result.outputs[kept.name].values.tolist()) if not keep}
    return dropped


def _column(port: Port, found: SourceRows, rows: Sequence[int]) -> Rows:
    """A field of rows for a function."""
    dtype = port.type.dtype
    if dtype == "str":
        return from_strings([text_of(found.where(row), found.rows[row], port.name) for row in rows])
    values = [_number(dtype, found.where(row), found.rows[row], port.name) for row in rows]
    return Rows(torch.tensor(values, dtype=TORCH_DTYPES[dtype]))


def _number(dtype: str, where: str, row: DataRow, field: str) -> int | float | bool:
    if field not in row:
        raise refused(f"{where} has no field `{field}`", did_you_mean(field, row, "fields"))
    value = row[field]
    fits = isinstance(value, _KINDS[dtype]) and isinstance(value, bool) == (dtype == "bool")
    if not fits or unwritable(value) or (dtype == "i64" and abs(value) >= 2**63):
        raise refused(f"{where}: field `{field}` is {_shown(value)}, which {dtype} cannot hold")
    return value
