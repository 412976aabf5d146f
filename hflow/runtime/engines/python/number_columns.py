"""Columns of numbers of a `data` node: a field of the row, or a template that gives a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hflow.diagnostics import HflowError, did_you_mean
from hflow.graph.infer.kinds.data import num_responses, number_columns, number_templates
from hflow.graph.ir import Node
from hflow.runtime.data_files import refused
from hflow.runtime.engines.python.row_texts import RowTexts

LARGEST = torch.finfo(torch.float32).max


def read_numbers(node: Node, texts: RowTexts) -> list[dict[str, tuple[float, ...]]]:
    """Of every row its numbers by column: one, or one for each response.

    Raises:
        HflowError: HF403 naming the row: a field is missing, what it holds or a template gives is no finite
            float32, or a list has another length than the responses.
    """
    columns: dict[str, list[tuple[float, ...]]] = {}
    for name, of_responses in number_columns({o.port: o.type for o in node.outputs}).items():
        count = (num_responses(node.options) or 1) if of_responses else None
        columns[name] = _column(node, name, count, texts)
    return [{name: column[place] for name, column in columns.items()} for place in range(len(texts.numbers))]


def _column(node: Node, name: str, count: int | None, texts: RowTexts) -> list[tuple[float, ...]]:
    """`count`: numbers in each row; None for one that is no list."""
    templates = number_templates(node.options.get("numbers", {}).get(name))
    if not templates:
        return [_field(texts.where(place), row, name, count) for place, row in enumerate(texts.rows)]
    rendered = zip(*(texts.render(f"number `{name}`", template) for template in templates))
    return [tuple(_parsed(texts.where(place), name, t) for t in row) for place, row in enumerate(rendered)]


def _field(where: str, row: Mapping[str, Any], name: str, count: int | None) -> tuple[float, ...]:
    if name not in row:
        raise refused(f"{where} has no field `{name}`", did_you_mean(name, row, "fields"))
    value = row[name]
    if count is None:
        return (_finite(where, name, value),)
    if not isinstance(value, list | tuple) or len(value) != count:
        what = f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        help_ = f"or say how it follows from the fields: `numbers: {{{name}: [...]}}`"
        raise refused(f"{where}: `{name}` is {what}, not {count} numbers", help_)
    return tuple(_finite(where, name, item) for item in value)


def _parsed(where: str, name: str, text: str) -> float:
    try:
        return _finite(where, name, float(text))
    except ValueError:
        raise _no_number(where, name, repr(text)) from None


def _finite(where: str, name: str, value: Any) -> float:
    """A truth value is no number: which one it stands for would be a guess."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise _no_number(where, name, repr(value))
    return float(value)


def _no_number(where: str, name: str, what: str) -> HflowError:
    return refused(f"{where}: `{name}` is {what:.40}, no finite number")
