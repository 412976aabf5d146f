"""The rows of a data node: of all files of all of its sources, in order, each with its place for messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from hflow.diagnostics import did_you_mean
from hflow.graph.row_sources import RowSource, is_mixture, path_kind, row_sources
from hflow.runtime.data_files import DataRow, read_file, refused
from hflow.runtime.datasets import read_rows
from hflow.runtime.hub_rows import all_rows, load_folder, load_hub

SOURCE = "source"  # the field that says which source of a mixture a row is from


@dataclass(frozen=True)
class SourceRows:
    """All rows that a node's sources have, before any is left out.

    Attributes:
        sources: in the order of the file.
        rows: of the first source, then of the second.
        of: the source of each row, by its place in `sources`.
        fields: that the first row of any source has.
        starts, names: of each file or dataset the number of its first row, from 0, and what to call it.
    """

    sources: tuple[RowSource, ...]
    rows: Sequence[DataRow]
    of: Sequence[int]
    fields: tuple[str, ...]
    starts: tuple[int, ...]
    names: tuple[str, ...]

    def where(self, row: int) -> str:
        """Row number `row`, as messages call it: by its place in its own file."""
        part = bisect_right(self.starts, row) - 1
        return f"row {row - self.starts[part]} of `{self.names[part]}`"


def read_sources(options: Mapping[str, Any]) -> SourceRows:
    """Read all rows of a data node.

    Raises:
        HflowError: HF403 when a source cannot be read or has no rows, or a field cannot be renamed.
    """
    sources, rows, of, names, starts = row_sources(options), [], [], [], []
    fields: dict[str, None] = {}
    for number, source in enumerate(sources):
        first = len(rows)
        for name, found in _read(source):
            names.append(name)
            starts.append(len(rows))
            rows += renamed(source, name, found)
        if first == len(rows):
            raise refused(f"`{source.shown}` has no rows")
        if is_mixture(options):
            _mark(source, rows, first, starts, names)
        of += [number] * (len(rows) - first)
        fields |= dict.fromkeys(rows[first])
    return SourceRows(sources, rows, of, tuple(fields), tuple(starts), tuple(names))


def _read(source: RowSource) -> Iterator[tuple[str, list[DataRow]]]:
    """The files or datasets of a source, by what to call them."""
    for path in source.paths:
        match path_kind(path):
            case "procedural":
                yield path, read_rows(path, source.size, source.options)
            case "hub":
                yield path, all_rows(path, load_hub(path, source.config, source.split, source.revision))
            case "folder":
                yield path, all_rows(path, load_folder(path, source.split))
            case _:
                yield from ((file, read_file(Path(file))) for file in files_of(path))


def files_of(path: str) -> list[str]:
    """The files that a pattern means, by name; a path without one, or that is there, means itself.

    Raises:
        HflowError: HF403 when a pattern means none.
    """
    if not has_magic(path) or Path(path).exists():
        return [path]
    found = sorted(glob(path, recursive=True))  # noqa: PTH207  (of Path, a pattern must be relative)
    if not found:
        raise refused(f"no file is called `{path}`")
    return found


def renamed(source: RowSource, name: str, rows: Sequence[DataRow], first: int = 0) -> Sequence[DataRow]:
    """Rows with the names of fields that a source gives them.

    Args:
        name: the file or dataset that they are from, in messages.
        first: the number of the first of them there.

    Raises:
        HflowError: HF403 with the row for a field that is not there, or a name that is there twice.
    """
    renames = source.rename_columns
    if not renames:
        return rows
    out: list[DataRow] = []
    for number, row in enumerate(rows, first):
        if missing := next((old for old in renames if old not in row), None):
            help_ = did_you_mean(missing, row, "fields")
            raise refused(f"row {number} of `{name}` has no field `{missing}` to rename", help_)
        entries = {renames.get(field, field): value for field, value in row.items()}
        if len(entries) < len(row):
            twice = next(new for new in renames.values() if new in row)
            raise refused(f"row {number} of `{name}` has a field `{twice}`, and another is renamed to it")
        out.append(entries)
    return out


def _mark(
    source: RowSource, rows: list[DataRow], first: int, starts: Sequence[int], names: Sequence[str]
) -> None:
    """Add the source's name to the rows from `first` on."""
    for number in range(first, len(rows)):
        if SOURCE in rows[number]:
            place = bisect_right(starts, number) - 1
            message = f"row {number - starts[place]} of `{names[place]}` has a field `{SOURCE}`"
            help_ = f"a mixture puts the source's name there; say `rename_columns: {{{SOURCE}: NAME}}`"
            raise refused(message, help_)
        rows[number] = {**rows[number], SOURCE: source.name}
