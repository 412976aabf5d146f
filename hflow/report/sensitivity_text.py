"""What `hflow compile --sensitivities` prints: a table for people, entries of JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hflow import units
from hflow.plan.plan import Plan
from hflow.report.sensitivity import NoSensitivity, Sensitivity, SensitivityRow
from hflow.report.sweep_text import gap_text
from hflow.view.terminal.table import Column, table
from hflow.view.terminal.terminal import labelled

COLUMNS: tuple[Column, ...] = (
    ("if there were", "left"),
    ("step", "right"),
    ("change", "right"),
    ("gap", "right"),
    ("nodes that move", "left"),
)


def sensitivities_text(plan: Plan, rows: Sequence[SensitivityRow], width: int) -> str:
    """A line for each variation after one for `plan`; below why there is no plan where a line has a code, and
    which plans are not proven to be the best."""
    today = "what there is", units.seconds(plan.step_time_s), "-", gap_text(plan.search.gap), "-"
    lines = [today, *((row.variation.name, *_shown(plan, row)) for row in rows)]
    reasons = dict.fromkeys((r.reason.code, r.reason.message) for r in rows if isinstance(r, NoSensitivity))
    notes = [*reasons, *_unproven(plan, rows)]
    return "\n\n".join(filter(None, (table(COLUMNS, lines, width), labelled(notes, width))))


def _shown(plan: Plan, row: SensitivityRow) -> tuple[str, ...]:
    if isinstance(row, NoSensitivity):
        return row.reason.code, "-", "-", "-"
    return units.seconds(row.step_time_s), _percent(row.change), gap_text(row.gap), _moved(plan, row)


def _moved(plan: Plan, row: Sensitivity) -> str:
    """How many of the nodes with models, then their names, which a narrow table cuts."""
    if not row.moved:
        return "none"
    movable = sum(node.model is not None for node in plan.nodes)
    return f"{len(row.moved)} of {movable}: {', '.join(row.moved)}"


def _percent(change: float) -> str:
    """Nothing is neither more nor less: ``0.0%``."""
    return "0.0%" if abs(change) < 5e-4 else f"{change:+.1%}"


def _unproven(plan: Plan, rows: Sequence[SensitivityRow]) -> Iterator[tuple[str, str]]:
    if plan.search.gap != 0:
        yield "note", "the plan is not proven best: all changes may be of another size, or sign"
        return
    unproven = [row.variation.name for row in rows if isinstance(row, Sensitivity) and row.gap != 0]
    if unproven:
        yield "note", f"not proven best, a step may take less: {'; '.join(unproven)}"


def sensitivities_json(rows: Sequence[SensitivityRow]) -> list[dict[str, Any]]:
    """None for what there is not."""
    return [_entry(row) for row in rows]


def _entry(row: SensitivityRow) -> dict[str, Any]:
    if isinstance(row, NoSensitivity):
        figures = dict.fromkeys(("step_time_s", "change_fraction", "gap_fraction", "moved"))
        return {"if": row.variation.name, **figures, "code": row.reason.code, "message": row.reason.message}
    return {
        "if": row.variation.name,
        "step_time_s": row.step_time_s,
        "change_fraction": row.change,
        "gap_fraction": row.gap,
        "moved": list(row.moved),
        "code": None,
        "message": None,
    }
