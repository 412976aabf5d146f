"""What `hflow sweep` prints: a table for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hflow import units
from hflow.diagnostics import Diagnostic
from hflow.report.sweep import NoPlan, SweptPlan, SweptRow
from hflow.view.terminal.table import Column, table
from hflow.view.terminal.terminal import labelled

FIGURES: tuple[Column, ...] = (
    ("step", "right"),
    ("bound", "right"),
    ("gap", "right"),
    ("tokens/s/device", "right"),
    ("peak", "right"),
    ("devices", "right"),
    ("device-s/step", "right"),
)
CSV_FIGURES = (
    "step_time_s",
    "bound_s",
    "gap_fraction",
    "tokens_per_s_per_device",
    "peak_memory_fraction",
    "devices_used",
    "devices",
    "device_s_per_step",
    "plan",
    "code",
    "message",
    "help",
)


def sweep_text(graph: str, rows: Sequence[SweptRow], width: int) -> str:
    """A line for every combination, in their order; keys that have one value stand above, and below why there
    is no plan where a line has a code in place of figures."""
    keys = [setting.key for setting in rows[0].settings]
    values = {key: list(dict.fromkeys(_value(row, key) for row in rows)) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    fixed = ", ".join(f"{key}={values[key][0]}" for key in keys if key not in varied)
    planned = sum(isinstance(row, SweptPlan) for row in rows)
    counts = f"{units.plural(len(rows), 'combination')}, {units.plural(planned, 'plan')}"
    head = labelled([(graph, counts), *([("set", fixed)] if fixed else [])], width)
    columns: list[Column] = [("cluster", "left"), *((key, "right") for key in varied), *FIGURES]
    lines = [(row.cluster, *(_value(row, key) for key in varied), *_shown(row)) for row in rows]
    reasons = dict.fromkeys(_reason(row.reason) for row in rows if isinstance(row, NoPlan))
    parts = [head, table(columns, lines, width), labelled(list(reasons), width)]
    return "\n\n".join(part for part in parts if part)


def _reason(why: Diagnostic) -> tuple[str, str]:
    """Its code and message, and what its help begins with: which size is wrong, say, or what is needed."""
    cause = why.help.partition("\n")[0].rstrip(":;")
    return why.code, f"{why.message}; {cause}" if cause else why.message


def _value(row: SweptRow, key: str) -> str:
    return next(setting.value for setting in row.settings if setting.key == key)


def _shown(row: SweptRow) -> tuple[str, ...]:
    if isinstance(row, NoPlan):
        return row.reason.code, *("-",) * (len(FIGURES) - 1)
    return (
        units.seconds(row.step_time_s),
        "-" if row.bound_s is None else units.seconds(row.bound_s),
        gap_text(row.gap),
        units.count(row.tokens_per_s_per_device),
        f"{row.peak_memory:.0%}",
        f"{row.devices_used} of {row.devices}",
        units.count(row.device_s_per_step),
    )


def gap_text(gap: float | None) -> str:
    """It never rounds to none."""
    if gap is None:
        return "not proven"
    return f"{gap:.1%}" if gap >= 5e-4 else "<0.1%" if gap else "0%"


def sweep_json(graph: str, rows: Sequence[SweptRow]) -> str:
    entries = [{"cluster": r.cluster, "settings": _settings(r), **_figures(r)} for r in rows]
    return json.dumps({"graph": graph, "combinations": entries})


def sweep_csv(rows: Sequence[SweptRow]) -> str:
    """The same figures, with their units in the names of columns; empty cells where there are none."""
    text = io.StringIO(newline="")
    keys = [setting.key for setting in rows[0].settings]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cluster", *keys, *CSV_FIGURES])
    for row in rows:
        figures = _figures(row)
        values = [setting.value for setting in row.settings]
        writer.writerow([row.cluster, *values, *(figures[name] for name in CSV_FIGURES)])
    return text.getvalue()


def _settings(row: SweptRow) -> dict[str, str]:
    return {setting.key: setting.value for setting in row.settings}


def _figures(row: SweptRow) -> Mapping[str, Any]:
    """By `CSV_FIGURES`; None for what there is not."""
    if isinstance(row, NoPlan):
        why = row.reason
        help_ = " ".join(why.help.split()) or None  # a combination has one line
        return {**dict.fromkeys(CSV_FIGURES), "code": why.code, "message": why.message, "help": help_}
    return {
        "step_time_s": row.step_time_s,
        "bound_s": row.bound_s,
        "gap_fraction": row.gap,
        "tokens_per_s_per_device": row.tokens_per_s_per_device,
        "peak_memory_fraction": row.peak_memory,
        "devices_used": row.devices_used,
        "devices": row.devices,
        "device_s_per_step": row.device_s_per_step,
        "plan": row.plan,
        "code": None,
        "message": None,
        "help": None,
    }
