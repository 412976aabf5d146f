"""Columns of numbers of a `data` node: a field of the row, or a template that gives a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hflow.diagnostics import HflowError, did_you_mean
from hflow.graph.infer.kinds.data import num_responses, number_columns, number_templates
from hflow.graph.ir import Node
from hflow.runtime.data_files import refused

Render = Callable[[str, str, str, Sequence[Mapping[str, Any]]], list[str]]  # dataset, what, template, rows
LARGEST = torch.finfo(torch.float32).max


def read_numbers(
    node: Node, rows: Sequence[Mapping[str, Any]], render: Render
) -> list[dict[str, tuple[float, ...]]]:
    """Of every row its numbers by column: one, or one for each response.

    Raises:
        HflowError: HF403 naming the row: a field is missing, what it holds or a template gives is no finite
            float32, or a list has another length than the responses.
    """
    columns: dict[str, list[tuple[float, ...]]] = {}
    for name, of_responses in number_columns({o.port: o.type for o in node.outputs}).items():
        count = (num_responses(node.options) or 1) if of_responses else None
        columns[name] = _column(node, name, count, rows, render)
    return [{name: column[number] for name, column in columns.items()} for number in range(len(rows))]


def _column(
    node: Node, name: str, count: int | None, rows: Sequence[Mapping[str, Any]], render: Render
) -> list[tuple[float, ...]]:
    """`count`: numbers in each row; None for one that is no list."""
    dataset = node.options["dataset"]
    templates = number_templates(node.options.get("numbers", {}).get(name))
    if not templates:
        return [_field(dataset, number, row, name, count) for number, row in enumerate(rows)]
    rendered = [render(dataset, f"number `{name}`", text, rows) for text in templates]
    of_rows = enumerate(zip(*rendered))
    return [tuple(_parsed(dataset, number, name, text) for text in texts) for number, texts in of_rows]


def _field(
    dataset: str, number: int, row: Mapping[str, Any], name: str, count: int | None
) -> tuple[float, ...]:
    if name not in row:
        help_ = did_you_mean(name, row, "fields")
        raise refused(f"row {number} of `{dataset}` has no field `{name}`", help_)
    value = row[name]
    if count is None:
        return (_finite(dataset, number, name, value),)
    if not isinstance(value, list | tuple) or len(value) != count:
        what = f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        help_ = f"or say how it follows from the fields: `numbers: {{{name}: [...]}}`"
        raise refused(f"row {number} of `{dataset}`: `{name}` is {what}, not {count} numbers", help_)
    return tuple(_finite(dataset, number, name, item) for item in value)


def _parsed(dataset: str, number: int, name: str, text: str) -> float:
    try:
        return _finite(dataset, number, name, float(text))
    except ValueError:
        raise _no_number(dataset, number, name, repr(text)) from None


def _finite(dataset: str, number: int, name: str, value: Any) -> float:
    """A truth value is no number: which one it stands for would be a guess."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise _no_number(dataset, number, name, repr(value))
    return float(value)


def _no_number(dataset: str, number: int, name: str, what: str) -> HflowError:
    return refused(f"row {number} of `{dataset}`: `{name}` is {what:.40}, no finite number")
