"""Time lines as SVG: one line of bars per device, or per set of devices that do the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.compiler.plan import Plan
from hflow.view import units
from hflow.view.palette import NO_MODEL, Colours, node_colours
from hflow.view.rendering import render
from hflow.view.ticks import ticks
from hflow.view.timeline import Bar, Track, measured_bars, planned_bars, tracks

LEFT, RIGHT, ROW, CHAR = 96, 24, 29, 6.7
TRANSFER: Colours = ("#d0d5dd", "#667085")


@dataclass(frozen=True)
class Drawn:
    """A bar in pixels; `thin` for what is not a node."""

    x: float
    width: float
    label: str
    tooltip: str
    fill: str
    line: str
    thin: bool


@dataclass(frozen=True)
class Row:
    y: int
    label: str
    bars: tuple[Drawn, ...]


@dataclass(frozen=True)
class Tick:
    x: float
    label: str


def plan_gantt(plan: Plan, width: int = 1100) -> str:
    """One step as the plan predicts it."""
    bars = planned_bars(plan)
    return _draw(f"{plan.graph.name}, planned", bars, _end(bars), node_colours(plan.graph), width)


def run_gantt(plan: Plan, events: Iterable[Mapping[str, Any]], step: int, width: int = 1100) -> str:
    """One step as it was measured, with transfers as thin bars."""
    bars = measured_bars(events, step)
    return _draw(f"{plan.graph.name}, step {step}", bars, _end(bars), node_colours(plan.graph), width)


def _end(bars: Sequence[Bar]) -> float:
    return max((b.end_s for b in bars), default=0.0) or 1.0


def _draw(title: str, bars: Sequence[Bar], end: float, colours: Mapping[str, Colours], width: int) -> str:
    scale = (width - LEFT - RIGHT) / end
    rows = [_row(i, track, scale, colours) for i, track in enumerate(tracks(bars))]
    axis = 10 + ROW * len(rows)
    marks = [Tick(round(LEFT + t * scale, 1), f"{t:g} s") for t in ticks(0, end, 8)]
    values = {"title": title, "rows": rows, "ticks": marks, "left": LEFT, "right": RIGHT}
    return render("gantt.svg", width=width, height=axis + 24, axis=axis, **values)


def _row(index: int, track: Track, scale: float, colours: Mapping[str, Colours]) -> Row:
    bars = tuple(_bar(bar, scale, colours) for bar in track.bars)
    return Row(8 + ROW * index, f"device {units.devices(track.devices)}", bars)


def _bar(bar: Bar, scale: float, colours: Mapping[str, Colours]) -> Drawn:
    thin = bar.kind != "call"
    fill, line = TRANSFER if thin else colours.get(bar.name, NO_MODEL)
    width = max(1.0, (bar.end_s - bar.start_s) * scale)
    fits = not thin and len(bar.name) * CHAR + 12 <= width
    took = units.seconds(bar.end_s - bar.start_s)
    tooltip = f"{bar.name} ({bar.kind}): {took}, from {bar.start_s:.3f} s to {bar.end_s:.3f} s"
    x = LEFT + bar.start_s * scale
    return Drawn(round(x, 1), round(width, 1), bar.name if fits else "", tooltip, fill, line, thin)
