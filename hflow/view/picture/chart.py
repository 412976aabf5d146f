"""One metric over the steps of a run, as an SVG line chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, isfinite

from hflow import units
from hflow.view.picture.layout import Point
from hflow.view.picture.rendering import render
from hflow.view.picture.ticks import spacing, ticks

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 408, 12, 162


@dataclass(frozen=True)
class AxisTick:
    at: float
    label: str


def line_chart(title: str, steps: Sequence[int], values: Sequence[float | None]) -> str:
    """Values over steps; where a value is missing or not finite, the line has a gap."""
    known = [v for v in values if v is not None and isfinite(v)]
    low, high = _range(known)
    first, last = min(steps, default=0), max(steps, default=1)
    span = max(1, last - first)

    def x(step: float) -> float:
        return round(LEFT + (step - first) / span * (RIGHT - LEFT), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    heights = ticks(low, high, 4)
    pieces = [[(x(s), y(v)) for s, v in piece] for piece in _pieces(steps, values)]
    return render(
        "chart.svg",
        title=title,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
        lines=[" ".join(f"{a},{b}" for a, b in piece) for piece in pieces],
        points=_ends(pieces),
        x_ticks=[AxisTick(x(t), f"{t:g}") for t in ticks(first, first + span, 6) if t == int(t)],
        y_ticks=[AxisTick(y(t), label) for t, label in zip(heights, units.axis(heights))],
    )


def _range(values: Sequence[float]) -> Point:
    """Round limits around all values; 0 is one of them if it is near."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    step = spacing((high - low) or abs(high) or 1.0, 4)
    low = floor(low / step) * step
    return low, max(high, low + step)


def _pieces(steps: Sequence[int], values: Sequence[float | None]) -> list[list[Point]]:
    pairs = list(zip(steps, values))
    groups = groupby(pairs, key=lambda pair: pair[1] is not None and isfinite(pair[1]))
    return [[(s, v) for s, v in group if v is not None] for finite, group in groups if finite]


def _ends(pieces: Sequence[Sequence[Point]]) -> list[Point]:
    """Points that a line does not show: lone ones; and the last of all, to read the result off."""
    lone = [piece[0] for piece in pieces if len(piece) == 1]
    return [*lone, pieces[-1][-1]] if pieces else []
