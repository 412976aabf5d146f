"""What `hflow samples` prints: for people, and as JSON. Texts of models are shown, never obeyed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from hflow import units
from hflow.report.samples.chosen import ChosenSamples, Sample
from hflow.units import printable

MOST = {"prompt": 600, "response": 1600}  # characters that are shown
INDENT = 10


def print_samples(chosen: ChosenSamples, console: Console) -> None:
    """A head line, then a block for every sample."""
    of = "" if chosen.found == chosen.total else f", {chosen.found:,} with the text"
    head = f"step {chosen.step}: {len(chosen.rows)} of {units.plural(chosen.total, 'sample')}{of}"
    console.print(Text(head, "bold"))
    several = len({row["node"] for row in chosen.rows}) > 1
    for row in chosen.rows:
        console.print()
        console.print(Text(headline(row, several), "cyan"))
        for name in ("prompt", "response"):
            _print_text(console, name, shortened(row[name] or "", MOST[name]))
        for name in chosen.further:
            if row.get(name) is not None:
                _print_text(console, f"{name}:", figure(row[name]), indent=len(name) + 2)


def headline(row: Sample, with_node: bool = False) -> str:
    """What is known of every sample, in a line."""
    return " · ".join(_facts(row, with_node))


def _facts(row: Sample, with_node: bool) -> Iterator[str]:
    yield f"{row['node']} row {row['row']}" if with_node else f"row {row['row']}"
    for name in ("reward", "advantage", "logprob"):
        if row[name] is not None:
            yield f"{name} {figure(row[name])}"
    if row["length"] is not None:
        end = f", {readable(row['finish'])}" if row["finish"] else ""
        yield units.plural(row["length"], "token") + end
    if row["version"] is not None:
        yield f"v{row['version']}"
    if row["data_row"] is not None:
        yield f"data {row['data_row']}"


def figure(value: Any) -> str:
    """A value of a sample, as text that a terminal can show."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return readable(str(value))


def readable(text: str) -> str:
    """A text with its lines, and without signs that a terminal would obey or cannot show."""
    return "\n".join(printable(line) for line in text.replace("\t", "    ").split("\n"))


def shortened(text: str, most: int) -> str:
    """At most so many characters, and how many more there are."""
    if len(text) <= most:
        return readable(text)
    return f"{readable(text[:most])} … ({len(text) - most:,} more characters; --json has all)"


def _print_text(console: Console, label: str, text: str, indent: int = INDENT) -> None:
    """A label, and beside it a text in as many lines as it takes."""
    room = max(20, console.width - indent)
    lines = Text(text).wrap(console, room) or [Text("")]
    for number, line in enumerate(lines):
        console.print(Text((label if number == 0 else "").ljust(indent), "dim"), end="")
        console.print(line, soft_wrap=True)


def samples_json(rows: Sequence[Sample]) -> str:
    """A list of objects with all columns, texts whole; numbers that are not finite are null."""
    return json.dumps([{name: _plain(value) for name, value in row.items()} for row in rows])


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
