"""The samples of a run that somebody wants to see: of one step, in an order, with a text in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.runtime.samples.files import read_samples, sample_files
from hflow.units import printable

Sample = dict[str, Any]  # a row, by column
ALIASES = ("reward", "advantage")  # columns that say once more what another does


@dataclass(frozen=True)
class ChosenSamples:
    """Rows of one step.

    Attributes:
        step: its number.
        rows: those that are shown.
        total: how many samples the step has.
        found: how many of them have the wanted text.
        further: columns that say what no column of every table does.
    """

    step: int
    rows: Sequence[Sample]
    total: int
    found: int
    further: tuple[str, ...]


def choose_samples(run: Path, step: int | None, sort: str, grep: str, limit: int) -> ChosenSamples:
    """Samples of a step, by default of the newest that has any.

    Args:
        sort: a column, the greatest value first; with a ``-`` before it the least; empty: as they were drawn.
        grep: a text that prompt or response must have, in capital letters or small ones.
        limit: at most so many.

    Raises:
        HflowError: HF407 when there are none, no such column, or a file is damaged.
    """
    steps = sample_files(run)
    if not steps:
        help_ = "`run: {samples: 10}` keeps those of every tenth step"
        raise HflowError(Diagnostic("HF407", f"`{printable(str(run))}` has no samples", help=help_))
    at = max(steps) if step is None else step
    table = read_samples(run, at)
    found = _with_text(table, grep) if grep else table
    if sort:
        found = _sorted(found, sort)
    return ChosenSamples(
        at, found.slice(0, limit).to_pylist(), table.num_rows, found.num_rows, further_columns(table)
    )


def further_columns(table: pa.Table) -> tuple[str, ...]:
    """Those of nodes, but for what is there as reward or advantage."""
    said = [repr(table.column(name).to_pylist()) for name in ALIASES]  # NaN is not equal to itself
    names = [name for name in table.column_names if "." in name]
    return tuple(name for name in names if repr(table.column(name).to_pylist()) not in said)


def best_and_worst(table: pa.Table, best: int, worst: int) -> list[Sample]:
    """So many samples, by reward, each once; the first ones where there are no rewards."""
    most = best + worst
    if table.num_rows <= most or table.column("reward").null_count == table.num_rows:
        return table.slice(0, most).to_pylist()
    ranked = _sorted(table, "reward")
    return [*ranked.slice(0, best).to_pylist(), *ranked.slice(table.num_rows - worst).to_pylist()]


def _with_text(table: pa.Table, text: str) -> pa.Table:
    is_there = [
        pc.match_substring(table.column(name), text, ignore_case=True)  # pyright: ignore
        for name in ("prompt", "response")
    ]
    return table.filter(pc.or_kleene(*is_there))  # pyright: ignore


def _sorted(table: pa.Table, sort: str) -> pa.Table:
    name = sort.removeprefix("-")
    if name not in table.column_names:
        help_ = did_you_mean(name, table.column_names, "columns")
        raise HflowError(Diagnostic("HF407", f"samples have no column `{printable(name)}`", help=help_))
    order = "ascending" if sort.startswith("-") else "descending"
    return table.take(pc.sort_indices(table, [(name, order)]))  # pyright: ignore
