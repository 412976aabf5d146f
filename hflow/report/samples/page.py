"""The samples of a run as one HTML page: a few of each step, the best and the worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hflow import units
from hflow.report.samples.chosen import Sample, best_and_worst, further_columns
from hflow.report.samples.text import figure, headline, readable
from hflow.runtime.samples.files import read_samples, sample_files
from hflow.view.picture.figure import Figure
from hflow.view.picture.rendering import render

STEPS, BEST, WORST = 40, 8, 4
MOST = 2000  # characters of a text


@dataclass(frozen=True)
class SampleCard:
    """One sample: all of its parts are text."""

    title: str
    prompt: str
    response: str
    further: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class SampledStep:
    """A section of the page."""

    step: int
    note: str
    cards: Sequence[SampleCard]


def samples_html(run: Path, name: str) -> str:
    """The page, complete. Raises HflowError HF407 when a file is damaged."""
    files = sample_files(run)
    steps = _spread(list(files), STEPS)
    size = sum(file.stat().st_size for file in files.values())
    figures = [
        Figure("steps with samples", str(len(files)), f"{len(steps)} are here"),
        Figure("size", units.size(size)),
    ]
    sections = [_section(step, read_samples(run, step)) for step in steps]
    return render("samples.html", title=f"{name}: samples", doc="", figures=figures, steps=sections[::-1])


def _spread(steps: list[int], most: int) -> list[int]:
    """So many of them, evenly, with the first and the last."""
    if len(steps) <= most:
        return steps
    return [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]


def _section(step: int, table: pa.Table) -> SampledStep:
    further = further_columns(table)
    nodes = sorted(set(table.column("node").to_pylist()))
    rows = [row for node in nodes for row in best_and_worst(_of(table, node), BEST, WORST)]
    note = f"{len(rows)} of {units.plural(table.num_rows, 'sample')}"
    return SampledStep(step, note, [_card(row, len(nodes) > 1, further) for row in rows])


def _of(table: pa.Table, node: str) -> pa.Table:
    return table.filter(pc.equal(table.column("node"), node))  # pyright: ignore


def _card(row: Sample, with_node: bool, further: Sequence[str]) -> SampleCard:
    told = [(name, _cut(figure(row[name]))) for name in further if row.get(name) is not None]
    return SampleCard(headline(row, with_node), _cut(row["prompt"]), _cut(row["response"]), told)


def _cut(text: str | None) -> str:
    shown = readable((text or "")[:MOST])
    left = len(text or "") - MOST
    return f"{shown} … ({left:,} more characters)" if left > 0 else shown
