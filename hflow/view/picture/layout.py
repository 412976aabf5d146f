"""Layered layout of a directed acyclic graph, left to right (Sugiyama, Tagawa & Toda 1981).

Three steps: a column per node, an order inside each column, and heights that keep links straight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hflow.view.picture.ordering import GraphLink, Slot, Wire, chain, column_numbers, ordered, wires
from hflow.view.picture.spacing import spaced

Point = tuple[float, float]
PASSAGE_HEIGHT = 2.0
ROUNDS = 100  # of heights; more change nothing that one could see
LEVEL = 4.0  # lines that rise or fall less than this are drawn level


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def moved(self, dx: float, dy: float) -> Rectangle:
        return Rectangle(self.x + dx, self.y + dy, self.width, self.height)


@dataclass(frozen=True)
class Layering:
    """`boxes` by node; `columns`: the left and right end of the column that a node stands in; `bends`: the
    points that a link passes between its two nodes."""

    boxes: Mapping[str, Rectangle]
    columns: Mapping[str, tuple[float, float]]
    bends: Mapping[GraphLink, tuple[Point, ...]]
    width: float
    height: float


@dataclass(frozen=True)
class Spacing:
    """Free space between columns, between nodes of a column, and around a link that passes a column."""

    x: float = 64
    y: float = 24
    passage: float = 13


def layered(
    links: Sequence[GraphLink],
    sizes: Mapping[str, tuple[float, float]],
    ports: Mapping[tuple[str, str], float] | None = None,
    gaps: Spacing | None = None,
) -> Layering:
    """Place nodes of the given (width, height); coordinates start at (0, 0).

    Args:
        ports: by node and value, how far below the node's top the value leaves it; by default in the middle.
    """
    gaps, ports = gaps or Spacing(), ports or {}
    column = column_numbers(list(sizes), links)
    pieces = wires(links, column, {key: at / sizes[key[0]][1] for key, at in ports.items()})
    order = ordered(column, pieces)
    spans = _spans(order, sizes, gaps.x)
    tops = _Heights(order, pieces, sizes, gaps).tops()
    lowest = min(tops.values(), default=0.0)
    boxes = {n: Rectangle(spans[column[n]][0], tops[n] - lowest, *sizes[n]) for n in sizes}
    middles = {s: top - lowest + PASSAGE_HEIGHT / 2 for s, top in tops.items()}
    starts = {link: boxes[link.source].y + _port(link, sizes, ports) for link in links}
    bends = {link: _bends(chain(link, column), starts[link], middles, spans) for link in links}
    bottoms = [b.bottom for b in boxes.values()] + [middles[s] for s in middles if not isinstance(s, str)]
    width = max((right for _, right in spans), default=0.0)
    return Layering(boxes, {n: spans[column[n]] for n in sizes}, bends, width, max(bottoms, default=0.0))


def _spans(order: Sequence[Sequence[Slot]], sizes: Mapping[str, Point], gap: float) -> list[Point]:
    """The left and right end of every column, which is as wide as its widest node."""
    spans: list[Point] = []
    x = 0.0
    for column in order:
        width = max(sizes[slot][0] for slot in column if isinstance(slot, str))
        spans.append((x, x + width))
        x += width + gap
    return spans


def _port(link: GraphLink, sizes: Mapping[str, Point], ports: Mapping[tuple[str, str], float]) -> float:
    return ports.get((link.source, link.value), sizes[link.source][1] / 2)


def _bends(
    slots: Sequence[Slot], start: float, middles: Mapping[Slot, float], spans: Sequence[Point]
) -> tuple[Point, ...]:
    """Straight through each column that is passed, after leaving the first node at the height `start`."""
    bends: list[Point] = []
    y = start
    for slot in slots:
        if isinstance(slot, str):
            continue
        y = y if abs(middles[slot] - y) < LEVEL else middles[slot]
        bends += [(x, y) for x in spans[slot.column]]
    return tuple(bends)


class _Heights:
    """Vertical places: every slot goes where its wires would be level, as far as its neighbours let it."""

    def __init__(
        self,
        order: Sequence[Sequence[Slot]],
        pieces: Sequence[Wire],
        sizes: Mapping[str, tuple[float, float]],
        gaps: Spacing,
    ) -> None:
        self._order = order
        self._gaps = gaps
        self._height = {s: sizes[s][1] if isinstance(s, str) else PASSAGE_HEIGHT for c in order for s in c}
        self._into: dict[Slot, list[Wire]] = {s: [] for s in self._height}
        self._out: dict[Slot, list[Wire]] = {s: [] for s in self._height}
        for wire in pieces:
            self._into[wire.target].append(wire)
            self._out[wire.source].append(wire)
        self._top: dict[Slot, float] = {}

    def tops(self) -> dict[Slot, float]:
        for column in self._order:
            self._settle(column, [0.0] * len(column), [1.0] * len(column))
        for number in range(ROUNDS):
            for column in self._order if number % 2 == 0 else reversed(self._order):
                pulls = [self._pull(slot) for slot in column]
                self._settle(column, [at for at, _ in pulls], [weight for _, weight in pulls])
        return {slot: round(top) for slot, top in self._top.items()}

    def _settle(self, column: Sequence[Slot], wanted: Sequence[float], weights: Sequence[float]) -> None:
        distances = [self._height[a] + self._gap(a, b) for a, b in pairwise(column)]
        self._top.update(zip(column, spaced(wanted, weights, distances)))

    def _gap(self, a: Slot, b: Slot) -> float:
        return self._gaps.y if isinstance(a, str) and isinstance(b, str) else self._gaps.passage

    def _pull(self, slot: Slot) -> tuple[float, float]:
        """The top at which a slot's wires are level in the mean, and how much that matters."""
        wants: list[tuple[float, float]] = []
        for wire in self._into[slot]:
            start = self._top[wire.source] + wire.port * self._height[wire.source]
            wants.append((start - self._height[slot] / 2, _importance(wire)))
        for wire in self._out[slot]:
            end = self._top[wire.target] + self._height[wire.target] / 2
            wants.append((end - wire.port * self._height[slot], _importance(wire)))
        total = sum(weight for _, weight in wants)
        if not total:
            return self._top[slot], 0.01
        return sum(at * weight for at, weight in wants) / total, total


def _importance(wire: Wire) -> float:
    """Long links most of all should be straight (Gansner, Koutsofios, North & Vo 1993)."""
    passages = sum(not isinstance(slot, str) for slot in (wire.source, wire.target))
    return (1.0, 2.0, 200.0)[passages]
