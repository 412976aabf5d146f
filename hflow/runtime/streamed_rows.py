"""The rows of a data node some at a time, in order: of files and datasets that no memory holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from hflow.bounded_read import UnreadableError, read_lines
from hflow.graph.row_sources import RowSource, path_kind, row_sources
from hflow.runtime.data_files import (
    BOM,
    DataRow,
    check_exists,
    opened_parquet,
    refused,
    row_of_line,
    table_rows,
)
from hflow.runtime.hub_rows import load_folder, load_hub, rows_between
from hflow.runtime.source_rows import SourceRows, files_of, renamed

PART = 1024  # rows that are read at once
MAX_LINE_BYTES = 2**28


class RowFile(Protocol):
    """One file or dataset of a stream."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def count(self) -> int:
        """How many rows it has. Raises HflowError HF403 when it cannot be read."""
        ...

    def parts(self, first: int) -> Iterator[list[DataRow]]:
        """Its rows from number `first` on, at most `PART` at once. Raises HflowError HF403 with the row."""
        ...


@dataclass(frozen=True)
class StreamPart:
    """Some rows that follow each other in one file.

    Attributes:
        first: the number of the first of them in the whole stream.
        file_first: that of the first row of their file.
        rows: they themselves; numbers there begin at 0.
    """

    first: int
    file_first: int
    rows: SourceRows


@dataclass(frozen=True)
class RowStream:
    """All rows of a node's one source. `fields`: that the first of them has."""

    source: RowSource
    files: tuple[RowFile, ...]
    fields: tuple[str, ...]

    def parts(self, first: int = 0) -> Iterator[StreamPart]:
        """The rows from number `first` on. What comes before them is counted, not parsed; of the last file,
        nothing behind them is.

        Raises:
            HflowError: HF403 when a file cannot be read, or a row is wrong.
        """
        file_first = 0
        for file in self.files:
            skipped = max(0, first - file_first)
            if skipped and file is not self.files[-1] and skipped >= (rows := file.count()):
                file_first += rows
                continue
            at = skipped
            for part in file.parts(skipped):
                yield StreamPart(file_first + at, file_first, self._rows(file.name, part, at))
                at += len(part)
            file_first += at

    def _rows(self, name: str, part: list[DataRow], at: int) -> SourceRows:
        """`at`: the number of the first of them in their file."""
        rows = renamed(self.source, name, part, at)
        return SourceRows((self.source,), rows, [0] * len(rows), self.fields, (-at,), (name,))


def open_stream(options: Mapping[str, Any]) -> RowStream:
    """The rows of a data node with checked options that streams them.

    Raises:
        HflowError: HF403 when a source cannot be read or has no rows.
    """
    (source,) = row_sources(options)
    files = tuple(file for path in source.paths for file in _files(source, path))
    stream = RowStream(source, files, ())
    first = next((part.rows.rows[0] for part in stream.parts()), None)
    if first is None:
        raise refused(f"`{source.shown}` has no rows")
    return RowStream(source, files, tuple(first))


def _files(source: RowSource, path: str) -> Iterator[RowFile]:
    match path_kind(path):
        case "hub":
            yield LoadedRows(path, load_hub(path, source.config, source.split, source.revision))
        case "folder":
            yield LoadedRows(path, load_folder(path, source.split))
        case _:
            for file in files_of(path):
                check_exists(Path(file))
                yield ParquetRows(file) if file.endswith(".parquet") else JsonLines(file)


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON objects, one on each line; lines that are blank are no rows."""

    name: str

    def count(self) -> int:
        return sum(1 for _ in self._rows())

    def parts(self, first: int) -> Iterator[list[DataRow]]:
        rows = islice(enumerate(self._rows()), first, None)
        parsed = (row_of_line(Path(self.name), line, row, number) for row, (number, line) in rows)
        while part := list(islice(parsed, PART)):
            yield part

    def _rows(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are rows, with their numbers from 1."""
        try:
            for number, line in enumerate(read_lines(self.name, MAX_LINE_BYTES), 1):
                content = line.removeprefix(BOM) if number == 1 else line
                if content.strip():
                    yield number, content
        except UnreadableError as error:
            raise refused(f"`{self.name}` cannot be read: {error}") from None


@dataclass(frozen=True)
class ParquetRows:
    """A Parquet file, read by its groups of rows."""

    name: str

    def count(self) -> int:
        with opened_parquet(Path(self.name)) as file:
            return file.metadata.num_rows

    def parts(self, first: int) -> Iterator[list[DataRow]]:
        import pyarrow

        with opened_parquet(Path(self.name)) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            group, at = 0, 0  # where reading begins: at the group in which the first row lies
            while group < len(sizes) and at + sizes[group] <= first:
                at, group = at + sizes[group], group + 1
            for batch in file.iter_batches(PART, row_groups=range(group, len(sizes))):
                table = pyarrow.Table.from_batches([batch]).slice(max(0, first - at))
                if table.num_rows:
                    yield table_rows(self.name, table, max(first, at))
                at += batch.num_rows


@dataclass(frozen=True)
class LoadedRows:
    """A dataset of the library `datasets`, whose rows stay in its files until they are read."""

    name: str
    loaded: Any

    def count(self) -> int:
        return len(self.loaded)

    def parts(self, first: int) -> Iterator[list[DataRow]]:
        for at in range(first, len(self.loaded), PART):
            yield rows_between(self.name, self.loaded, at, min(at + PART, len(self.loaded)))
