"""The rows of a JSONL, JSON, CSV or Parquet file, within limits; what is wrong is told with the row's number,
from 0. Readers are strict: nothing is guessed, cut or filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, parse_json, read_bytes
from hflow.diagnostics import Diagnostic, HflowError, Span, did_you_mean
from hflow.graph.row_sources import KINDS_TEXT
from hflow.runtime.csv_rows import BadCsvError, csv_rows

MAX_BYTES = 16 * 2**30  # a worker holds all rows in its memory
MAX_ROWS = 2**24  # a few bytes of Parquet can stand for any number of equal rows
BOM = b"\xef\xbb\xbf"

DataRow = dict[str, Any]


def read_file(path: Path) -> list[DataRow]:
    """All rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, each a mapping from field to value.

    Raises:
        HflowError: HF403 when it is of another kind, no regular file, too large, or damaged.
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        message = f"dataset `{path}` is of no known kind"
        raise refused(message, f"datasets: {KINDS_TEXT}")
    check_exists(path)
    return reader(path)


def check_exists(path: Path) -> None:
    """Raises HflowError HF403 for a file that is not there, with files of similar names."""
    try:
        if not path.exists():
            beside = (p.name for p in path.parent.glob(f"*{path.suffix}"))
            raise refused(f"no file `{path}`", did_you_mean(path.name, beside, f"in `{path.parent}`"))
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        raise refused(f"`{path}` cannot be read: {error}") from None


def refused(message: str, help_: str = "", span: Span | None = None) -> HflowError:
    return HflowError(Diagnostic("HF403", message, span, help_))


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_BYTES).removeprefix(BOM)  # some editors begin with one
    except UnreadableError as error:
        raise refused(f"`{path}` cannot be read: {error}") from None


def _text(path: Path) -> str:
    try:
        return _content(path).decode()
    except UnicodeDecodeError as error:
        raise refused(f"`{path}` is not UTF-8: {error.reason} at byte {error.start}") from None


def _json(path: Path) -> list[DataRow]:
    """A list of objects, or one object on each line."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _lines(path, text.encode())
    try:
        rows = parse_json(text)
    except UnreadableError as error:
        span = Span(str(path), error.line, 1, 2) if error.line else None
        raise refused(f"`{path}`: {error}", span=span) from None
    bad = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
    if bad is not None:
        raise refused(f"row {bad} of `{path}`: the list holds JSON objects, this is none")
    check_count(path, len(rows))
    return rows


def _csv(path: Path) -> list[DataRow]:
    try:
        rows = csv_rows(_text(path))
    except BadCsvError as error:
        where = f"row {error.row} of `{path}`" if error.row is not None else f"`{path}`"
        raise refused(f"{where}: {error}", span=Span(str(path), error.line, 1, 2)) from None
    check_count(path, len(rows))
    return rows


def _jsonl(path: Path) -> list[DataRow]:
    return _lines(path, _content(path))


def _lines(path: Path, content: bytes) -> list[DataRow]:
    rows: list[DataRow] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            rows.append(row_of_line(path, line, len(rows), number))
    check_count(path, len(rows))
    return rows


def row_of_line(path: Path, line: bytes, row: int, number: int) -> DataRow:
    """Row number `row` of a file of JSON lines.

    Args:
        number: of the line, from 1.

    Raises:
        HflowError: HF403 with the place when it is not one JSON object.
    """
    span = Span(str(path), number, 1, len(line) + 1)
    try:
        found = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise refused(f"row {row} of `{path}` is not UTF-8: {error.reason}", span=span) from None
    except UnreadableError as error:
        raise refused(f"row {row} of `{path}`: {error}", span=span) from None
    if not isinstance(found, dict):
        raise refused(f"row {row} of `{path}`: a line holds one JSON object, this one does not", span=span)
    return found


def _parquet(path: Path) -> list[DataRow]:
    with opened_parquet(path) as file:
        check_count(path, file.metadata.num_rows)
        table = file.read()
    return table_rows(path, table)


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        HflowError: HF403 when it is no regular file or damaged, also where that shows when it is read.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise refused(f"`{path}` cannot be read: it is no regular file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (OSError, ValueError, MemoryError, pyarrow.ArrowException) as error:
        raise refused(f"`{path}` cannot be read: {error}") from None


def table_rows(path: Path | str, table: Any, first: int = 0) -> list[DataRow]:
    """The rows of a pyarrow table.

    Args:
        path: where it is from, for messages.
        first: the number of its first row there.

    Raises:
        HflowError: HF403 for a column that is there twice, or a value that Python cannot hold.
    """
    names = table.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise refused(f"`{path}` has two columns called `{twice[0]}`")
    columns = [_values(path, name, column, first) for name, column in zip(names, table.columns)]
    return [dict(zip(names, values)) for values in zip(*columns)]


def _values(path: Path | str, name: str, column: Any, first: int) -> Sequence[Any]:
    try:
        return column.to_pylist()
    except Exception:  # of many kinds: text that is not UTF-8, a date that Python cannot hold
        return [_value(path, name, row, scalar) for row, scalar in enumerate(column, first)]


def _value(path: Path | str, name: str, row: int, scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except Exception as error:
        message = f"row {row} of `{path}`: field `{name}` cannot be read: {error}"
        raise refused(message) from error


def check_count(path: Path | str, rows: int) -> None:
    """Raises HflowError HF403 for more rows than a worker takes."""
    if rows > MAX_ROWS:
        raise refused(f"`{path}` has {rows} rows; at most {MAX_ROWS} are read")
