"""What trackers show of a run beside numbers: texts of samples, and names that they can order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from hflow.bounded_read import UnreadableError, read_json
from hflow.report.samples.chosen import ChosenSamples, best_and_worst, further_columns
from hflow.report.samples.text import print_samples
from hflow.runtime.samples.files import read_samples
from hflow.whole_file import write_whole

STATE, MAX_STATE_BYTES = "trackers.json", 2**20
BEST, WORST, COLUMNS = 5, 3, 100


def in_sections(name: str) -> str:
    """``time_s/rollout``: trackers that draw many curves put those with one beginning together."""
    return name.replace(".", "/", 1)


def samples_text(run: Path, step: int) -> str:
    """The best and the worst samples of a step, as text without signs that a terminal would obey."""
    table = read_samples(run, step)
    rows = best_and_worst(table, BEST, WORST)
    out = StringIO()
    chosen = ChosenSamples(step, rows, table.num_rows, table.num_rows, further_columns(table))
    print_samples(chosen, Console(file=out, width=COLUMNS, no_color=True, highlight=False, emoji=False))
    return out.getvalue()


def sample_rows(run: Path, step: int, most: int) -> tuple[list[str], list[list[Any]]]:
    """Names of columns, and the first rows of a step's samples."""
    table = read_samples(run, step).slice(0, most)
    return table.column_names, [list(row.values()) for row in table.to_pylist()]


def remembered(run: Path, tracker: str) -> dict[str, Any]:
    """What a tracker has left in the run's folder for when the run goes on."""
    return _state(run).get(tracker, {})


def remember(run: Path, tracker: str, what: Mapping[str, Any]) -> None:
    state = {**_state(run), tracker: dict(what)}
    write_whole(run / STATE, json.dumps(state, indent=2) + "\n", "HF407")


def _state(run: Path) -> dict[str, Any]:
    try:
        found = read_json(run / STATE, MAX_STATE_BYTES)
    except UnreadableError:
        return {}
    return found if isinstance(found, dict) else {}
