"""Random damage to data files: to their bytes and text, and to values and columns of their rows."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.graph.mutants import mutated

Rows = list[dict[str, Any]]
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 0.5, float("nan"), float("inf"), "", "1+1", "é", "\ud800", "9" * 99, [], {}),
    *([None], {"sum": None}, {"sum": float("nan")}, [[[["1"]]]]),
)
COLUMNS: tuple[Callable[[int], pyarrow.Array], ...] = (
    lambda n: pyarrow.nulls(n),
    lambda n: pyarrow.array([b"\xff\xfe"] * n).view(pyarrow.string()),
    lambda n: pyarrow.array([b"1"] * n),
    lambda n: pyarrow.array([2**62] * n, pyarrow.timestamp("ms")),
    lambda n: pyarrow.array([datetime(2020, 1, 1)] * n),
    lambda n: pyarrow.array([Decimal("1.50")] * n),
    lambda n: pyarrow.array([float("nan")] * n),
    lambda n: pyarrow.array(["1"] * n).dictionary_encode(),
    lambda n: pyarrow.array([{"sum": None}] * n, pyarrow.struct([("sum", pyarrow.string())])),
    lambda n: pyarrow.array([[("sum", 1)]] * n, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    lambda n: pyarrow.array([[1, None]] * n),
)


def damaged_jsonl(rows: Rows, seed: int) -> bytes:
    """Lines of JSON of which some are not, or hold other values."""
    rng = random.Random(seed)
    rows = copy.deepcopy(rows)
    if rng.randrange(2):
        for _ in range(rng.randint(1, 3)):
            _change(rows, rng)
        return _lines(rows)
    lines = _lines(rows).splitlines(keepends=True)
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            return mutated(b"".join(lines[:1]), rng.randrange(2**32)) + b"\n" + b"".join(lines[1:])
        case 1:
            lines[at] = lines[at][: rng.randrange(len(lines[at]))] + b"\n"
        case 2:
            lines[at] = b'{"answer": 1, ' + lines[at][1:]  # which has an answer
        case 3:
            lines[at] = b'{"meta": ' + b"[" * rng.choice((10, 70, 100_000)) + b"\n"
        case _:
            lines[at] = lines[at].replace(b"1", rng.randbytes(2), 1)
    return b"".join(lines)


def damaged_parquet(rows: Rows, seed: int, file: Path) -> None:
    """Write a table with other values or columns, or with damaged bytes."""
    rng = random.Random(seed)
    table = pyarrow.Table.from_pylist(rows)
    kind = rng.randrange(4)
    if kind == 0:
        table = _other_values(rows, rng)
    elif kind == 1:
        table = _other_columns(table, rng)
    pyarrow.parquet.write_table(table, file, compression=rng.choice(("none", "snappy", "zstd")))
    if kind > 1:
        file.write_bytes(_other_bytes(file.read_bytes(), rng))


def _other_values(rows: Rows, rng: random.Random) -> pyarrow.Table:
    changed = copy.deepcopy(rows)
    _change(changed, rng)
    try:
        return pyarrow.Table.from_pylist(changed)
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError, ValueError):  # no column holds these
        return pyarrow.Table.from_pylist([{**row, "answer": None} for row in rows])


def _other_columns(table: pyarrow.Table, rng: random.Random) -> pyarrow.Table:
    at = rng.randrange(table.num_columns)
    name = table.column_names[at]
    match rng.randrange(4):
        case 0:
            return table.remove_column(at)
        case 1:
            return table.append_column(name, table.column(at))
        case _:
            return table.set_column(at, name, rng.choice(COLUMNS)(table.num_rows))


def _other_bytes(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content))
        content = content[:at] + rng.randbytes(1) + content[at + 1 :]
    return content[: rng.randrange(len(content))] if rng.randrange(8) == 0 else content


def _change(rows: Rows, rng: random.Random) -> None:
    row = rng.choice(rows)
    match rng.randrange(5):
        case 0:
            rows.append(copy.deepcopy(row))
        case 1:
            del row[rng.choice(sorted(row))]
            row.setdefault("other", 1)
        case 2:
            row["meta"] = {"sum": rng.choice(VALUES)}
        case _:
            row[rng.choice(("answer", "question", "meta"))] = rng.choice(VALUES)


def _lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
