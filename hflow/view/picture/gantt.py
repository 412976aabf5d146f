"""Time lines as SVG: one line of bars per device, or per set of devices that do the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow import units
from hflow.plan.plan import Plan
from hflow.view.picture.gantt_legend import CHAR, GanttLegend, gantt_legend, is_node
from hflow.view.picture.palette import NO_MODEL, Colours, node_colours
from hflow.view.picture.rendering import render
from hflow.view.picture.ticks import ticks
from hflow.view.timeline import Bar, Track, end_s, measured_tracks, steady_tracks

RIGHT, ROW, AXIS = 24, 29, 24
LEAST_LEFT, MOST_LEFT = 96, 230  # pixels for the names of devices
TRANSFER: Colours = ("#d0d5dd", "#667085")


@dataclass(frozen=True)
class DrawnBar:
    """A bar in pixels; `thin` for what is not a node. `label` stands `inset` pixels from its left end."""

    x: float
    width: float
    label: str
    inset: float
    tooltip: str
    fill: str
    line: str
    thin: bool


@dataclass(frozen=True)
class GanttRow:
    y: int
    label: str
    bars: tuple[DrawnBar, ...]


@dataclass(frozen=True)
class Tick:
    x: float
    label: str


def plan_gantt(plan: Plan, width: int = 1100, steps: int = 1) -> str:
    """So many steps of a long run as the plan predicts them, with transfers as thin bars."""
    marks = [plan.step_time_s * n for n in range(1, steps)]
    return _draw(f"{plan.graph.name}, planned", steady_tracks(plan, steps), plan, width, marks)


def run_gantt(plan: Plan, events: Iterable[Mapping[str, Any]], step: int, width: int = 1100) -> str:
    """One step as it was measured, with transfers as thin bars."""
    return _draw(f"{plan.graph.name}, step {step}", measured_tracks(events, step), plan, width)


def _draw(
    title: str, tracks: Sequence[Track], plan: Plan, width: int, boundaries_s: Sequence[float] = ()
) -> str:
    """`boundaries_s`: where one step ends and the next one begins."""
    end = end_s(tracks) or 1.0
    labels = [f"device {units.short_devices(t.devices)}" for t in tracks]
    left = min(MOST_LEFT, max(LEAST_LEFT, 20 + round(CHAR * max(map(len, labels), default=0))))
    scale = (width - left - RIGHT) / end
    colours = node_colours(plan.graph)
    legend = gantt_legend(tracks, scale, width - left - RIGHT)
    rows = [
        GanttRow(8 + ROW * i, label, tuple(_bar(bar, left, scale, colours, legend) for bar in track.bars))
        for i, (label, track) in enumerate(zip(labels, tracks))
    ]
    axis = 10 + ROW * len(rows)
    marks = [Tick(round(left + t * scale, 1), f"{t:g} s") for t in ticks(0, end, 8)]
    return render(
        "gantt.svg",
        title=title,
        width=width,
        height=axis + AXIS + round(legend.height),
        axis=axis,
        left=left,
        right=RIGHT,
        rows=rows,
        ticks=marks,
        legend=[(each, colours.get(each.node, NO_MODEL)[1]) for each in legend.names],
        legend_top=axis + AXIS,
        boundaries=[round(left + t * scale, 1) for t in boundaries_s],
    )


def _bar(
    bar: Bar, left: float, scale: float, colours: Mapping[str, Colours], legend: GanttLegend
) -> DrawnBar:
    thin = not is_node(bar)
    fill, line = TRANSFER if thin else colours.get(bar.node, NO_MODEL)
    width = max(1.0, bar.seconds * scale)
    label = legend.label(bar, width)
    inset = 7.0 if label == bar.name else round((width - CHAR * len(label)) / 2, 1)
    took = units.seconds(bar.seconds)
    tooltip = f"{bar.name} ({bar.kind}): {took}, from {bar.start_s:.3f} s to {bar.end_s:.3f} s"
    x = left + bar.start_s * scale
    return DrawnBar(round(x, 1), round(width, 1), label, inset, tooltip, fill, line, thin)
