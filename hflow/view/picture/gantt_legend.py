"""Names of bars that are too short for them: a number in the bar, and the name beside it in a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.view.timeline import Bar, Track

CHAR = 6.7  # pixels of a letter
NAME_PAD = 12  # pixels that a bar needs beside its name
NUMBER_WIDTH = 2 * CHAR + 3  # of a bar with room for a number
LINE, GAP = 18, 18  # of the legend: between lines, and between names


@dataclass(frozen=True)
class LegendName:
    """In pixels from the legend's top left; without a number, what is not seen at all."""

    x: float
    y: float
    number: str
    name: str
    node: str = ""


@dataclass(frozen=True)
class GanttLegend:
    """`numbers`: by the name of each node that has a bar with room for a number alone."""

    numbers: Mapping[str, str]
    names: tuple[LegendName, ...]
    height: float

    def label(self, bar: Bar, width: float) -> str:
        """What stands in a bar of so many pixels: its name, or else its number, or else nothing."""
        if not is_node(bar):
            return ""
        if _has_room(bar.name, width):
            return bar.name
        number = self.numbers.get(bar.name, "")
        return number if width >= NUMBER_WIDTH else ""


def is_node(bar: Bar) -> bool:
    """Else it moves something, is drawn thin, and bears no name."""
    return bar.kind == "call"


def gantt_legend(tracks: Sequence[Track], scale: float, width: float) -> GanttLegend:
    """`scale`: pixels of a second; `width`: pixels of a line of names."""
    nodes = sorted((bar for t in tracks for bar in t.bars if is_node(bar)), key=lambda bar: bar.start_s)
    nameless = [bar for bar in nodes if not _has_room(bar.name, bar.seconds * scale)]
    numbered = {bar.name: bar for bar in nameless if bar.seconds * scale >= NUMBER_WIDTH}
    numbers = {name: str(number) for number, name in enumerate(numbered, 1)}
    shown = {bar.name for bar in nodes if _has_room(bar.name, bar.seconds * scale)} | numbers.keys()
    unseen = [name for name in dict.fromkeys(bar.name for bar in nameless) if name not in shown]
    entries = [LegendName(0, 0, numbers[name], name, bar.node) for name, bar in numbered.items()]
    names = _in_lines([*entries, *_listed(unseen)], width)
    return GanttLegend(numbers, names, names[-1].y + LINE if names else 0.0)


def _listed(unseen: Sequence[str]) -> tuple[LegendName, ...]:
    """One entry for each, so that a long list can be broken into lines."""
    words = [f"{name}," for name in unseen[:-1]] + list(unseen[-1:])
    begun = [f"too short to see: {word}" for word in words[:1]] + words[1:]
    return tuple(LegendName(0, 0, "", word) for word in begun)


def _in_lines(entries: Sequence[LegendName], width: float) -> tuple[LegendName, ...]:
    """What is not seen begins a line of its own."""
    placed: list[LegendName] = []
    x, y = 0.0, 0.0
    for before, entry in zip([None, *entries], entries):
        length = CHAR * (len(entry.number) + 1 + len(entry.name))
        begins = before is not None and bool(before.number) and not entry.number
        if x and (begins or x + length > width):
            x, y = 0.0, y + LINE
        placed.append(replace(entry, x=round(x), y=y))
        x += length + (GAP if entry.number else 0)
    return tuple(placed)


def _has_room(name: str, width: float) -> bool:
    return CHAR * len(name) + NAME_PAD <= width
