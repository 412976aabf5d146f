"""What fills the memory of each set of devices at its peak, as SVG: one line of stacked bars for each set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hflow import units
from hflow.plan.plan import DeviceMemory, Plan
from hflow.view.picture.gantt import CHAR, LEAST_LEFT, MOST_LEFT, RIGHT, Tick
from hflow.view.picture.palette import NO_MODEL, Colours, model_colours, node_colours
from hflow.view.picture.rendering import render
from hflow.view.picture.ticks import ticks

ROW = 40  # pixels from one line to the next


@dataclass(frozen=True)
class MemoryBar:
    """What one thing takes, in pixels."""

    x: float
    width: float
    label: str
    tooltip: str
    fill: str
    line: str


@dataclass(frozen=True)
class MemoryRow:
    """`during`: the node that runs when the peak is reached."""

    y: int
    label: str
    during: str
    parts: tuple[MemoryBar, ...]


def memory_chart(plan: Plan, width: int = 1100) -> str:
    """Bars from 0 to the capacity of a device, which is a dashed line."""
    capacity = max((m.capacity_bytes for m in plan.memory), default=1)
    labels = [f"device {units.short_devices(m.devices)}" for m in plan.memory]
    during = [f"in {m.node}" if m.node else "" for m in plan.memory]
    longest = max(map(len, (*labels, *during)), default=0)
    left = min(MOST_LEFT, max(LEAST_LEFT, 20 + round(CHAR * longest)))
    scale = (width - left - RIGHT) / max(capacity, *(m.peak_bytes for m in plan.memory), 1)
    colours = {**model_colours(plan.graph), **node_colours(plan.graph)}
    rows = [
        MemoryRow(10 + ROW * i, label, node, tuple(_parts(memory, left, scale, colours)))
        for i, (label, node, memory) in enumerate(zip(labels, during, plan.memory))
    ]
    axis = 10 + ROW * len(rows)
    marks = [Tick(round(left + t * scale, 1), units.size(t) if t else "0") for t in ticks(0, capacity, 8)]
    return render(
        "memory.svg",
        title=f"{plan.graph.name}, memory at its peak",
        width=width,
        height=axis + 24,
        axis=axis,
        left=left,
        rows=rows,
        ticks=marks,
        capacity=round(left + capacity * scale, 1),
    )


def _parts(
    memory: DeviceMemory, left: float, scale: float, colours: Mapping[str | None, Colours]
) -> Iterator[MemoryBar]:
    """The largest first, in the colours of the model or node that a part is named after. Where its name is
    too long, it has one without the layout, or none."""
    x = left
    for name, size in sorted(memory.parts.items(), key=lambda part: (-part[1], part[0])):
        width = size * scale
        label = next((text for text in (name, name.partition(" (")[0]) if len(text) * CHAR + 14 <= width), "")
        fill, line = colours.get(name.split(" ")[0], NO_MODEL)
        yield MemoryBar(round(x, 1), round(width, 1), label, f"{name}: {units.size(size)}", fill, line)
        x += width
