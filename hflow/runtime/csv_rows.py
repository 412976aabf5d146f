"""The rows of a CSV text (RFC 4180: commas, double quotes, a line of names first).

A column is of numbers where every cell that is not empty says its number as Python would write it (``7``,
``-1.5``); its empty cells are null. All other columns are texts as they stand: ``007``, ``1e3``, ``NA`` and
``None`` stay what they are, and an empty cell is the empty text.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Any

MAX_CELL = 2**31 - 1  # characters; csv's own limit is 128 KiB
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # within 64 bits


class BadCsvError(Exception):
    """`row`: from 0, None for the line of names; `line`: of the file, from 1, where it ends."""

    def __init__(self, message: str, row: int | None, line: int):
        super().__init__(message)
        self.row = row
        self.line = line


def csv_rows(text: str) -> list[dict[str, Any]]:
    """All rows by the names in the first line; empty lines are skipped.

    Raises:
        BadCsvError: it is no CSV, a name is empty or there twice, or a row has more or fewer cells.
    """
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] | None = None
    cells: list[list[str]] = []
    while (row := _next(reader, None if names is None else len(cells))) is not None:
        if not row:
            continue
        if names is None:
            names = _checked(row, reader.line_num)
        elif len(row) != len(names):
            message = f"{len(row)} cells, but the first line names {len(names)} columns"
            raise BadCsvError(message, len(cells), reader.line_num)
        else:
            cells.append(row)
    columns = [_column([row[i] for row in cells]) for i in range(len(names or ()))]
    return [dict(zip(names or (), values)) for values in zip(*columns)]


def _next(reader: Any, row: int | None) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        raise BadCsvError(f"bad CSV: {error}", row, reader.line_num) from None


def _checked(names: list[str], line: int) -> list[str]:
    if "" in names:
        raise BadCsvError("the first line has an empty name", None, line)
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadCsvError(f"two columns are called `{twice[0]}`", None, line)
    return names


def _column(cells: Sequence[str]) -> Sequence[Any]:
    numbers = [_number(cell) if cell else None for cell in cells]
    said = [number for number, cell in zip(numbers, cells) if cell]
    return cells if not said or None in said else numbers


def _number(cell: str) -> int | float | None:
    """The number that a cell says, if it is written as Python writes it."""
    if _WHOLE.fullmatch(cell):
        return int(cell)
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) and repr(number) == cell else None
