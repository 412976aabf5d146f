"""What else a node could have had, and why it has not: `hflow compile --explain NODE`."""

from __future__ import annotations

from collections.abc import Sequence

from hflow import units
from hflow.compiler.explain.alternatives import Alternative
from hflow.view.terminal.table import Column, table

COLUMNS: tuple[Column, ...] = (
    ("", "left"),
    ("layout", "left"),
    ("device", "left"),
    ("time", "right"),
    ("step", "right"),
    ("why", "left"),
)


def alternatives_text(node: str, found: Sequence[Alternative], width: int = 100) -> str:
    """A table, the chosen way first; `time` is the node's, `step` that of the best plan with it."""
    rows = [_row(number, alternative) for number, alternative in enumerate(found)]
    return f"{node}: {units.plural(len(found), 'layout')} compared\n{table(COLUMNS, rows, width)}"


def _row(number: int, alternative: Alternative) -> tuple[str, ...]:
    return (
        "chosen" if number == 0 else str(number + 1),
        alternative.layout,
        units.devices(alternative.devices),
        _seconds(alternative.node_time_s),
        _seconds(alternative.step_time_s),
        alternative.reason,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else units.seconds(value)
