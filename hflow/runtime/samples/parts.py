"""What workers hand to the controller of a step's samples: files with pieces of columns, one of each worker.

They travel as files, as checkpoints do: the controller's messages stay small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hflow.bounded_read import UnreadableError, read_bytes
from hflow.diagnostics import Diagnostic, HflowError
from hflow.whole_file import write_whole

MAX_PART_BYTES = 2**33


@dataclass(frozen=True)
class SampleRequest:
    """What a worker is asked for: its part of the first `rows` rows, in a file in `folder`."""

    folder: str
    rows: int


@dataclass(frozen=True)
class SamplePiece:
    """Consecutive rows of one column.

    Attributes:
        table: its number among those of the plan.
        column: its name.
        first: the number of the first of the rows in the table.
        values: one for each.
    """

    table: int
    column: str
    first: int
    values: pa.Array


def write_pieces(file: Path, pieces: Iterable[SamplePiece]) -> None:
    """Raises HflowError HF407 when the file cannot be written."""
    found = list(pieces)
    columns = {
        "table": [piece.table for piece in found],
        "column": [piece.column for piece in found],
        "first": [piece.first for piece in found],
        "values": [_packed(pa.table({"values": piece.values})) for piece in found],
    }
    write_whole(file, _packed(pa.table(columns)), "HF407")


def read_pieces(file: Path) -> list[SamplePiece]:
    """What `write_pieces` has written. Raises HflowError HF407 when it cannot be read."""
    try:
        lines = _unpacked(read_bytes(file, MAX_PART_BYTES)).to_pylist()
        return [SamplePiece(p["table"], p["column"], p["first"], _values(p["values"])) for p in lines]
    except (UnreadableError, pa.ArrowException) as error:
        raise HflowError(Diagnostic("HF407", f"`{file}` cannot be read: {error}")) from None


def _values(packed: bytes) -> pa.Array:
    return _unpacked(packed).column("values").combine_chunks()


def _packed(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _unpacked(packed: bytes) -> Any:
    with pa.ipc.open_stream(packed) as reader:
        return reader.read_all()
