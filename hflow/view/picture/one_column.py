"""A graph as one column of cards, for screens too narrow for several (an arc diagram, upright).

Values go down on the right, what is left to later steps goes up on the left, each in a lane beside the cards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TypeVar

from hflow.graph.ir import Graph, Node, Region
from hflow.view import words
from hflow.view.picture.cards import LINE, Card, Face, Label, text_width
from hflow.view.picture.connections import Connection, Feedback
from hflow.view.picture.layout import Point, Rectangle
from hflow.view.picture.lines import (
    EXIT,
    LABEL_SIZE,
    Drawing,
    DrawnLine,
    Lowering,
    feedback_line,
    value_line,
)
from hflow.view.picture.palette import FAINT, MUTED, model_colours
from hflow.view.picture.paths import arrow_head, corners

GAP, NOTE = 20, 15  # pixels between cards, and for a line of words below one
FRAME_TOP, FRAME_PAD = 36, 8
LANE, TO_LANES = 8, 18  # between lanes, and from the cards to the first
ENTRY, APART = 9, 7  # below the top of a card, where the first line enters it, and between two

Spanning = TypeVar("Spanning", bound=Hashable)


@dataclass(frozen=True)
class OneColumn:
    """Cards of one width, from (0, 0) down; `frames`: around a region, as far as the middle of its outlet."""

    boxes: Mapping[str, Rectangle]
    frames: Mapping[str, Rectangle]
    width: float
    height: float


def one_column(graph: Graph, faces: Mapping[str, Face], backwards: Sequence[Feedback]) -> OneColumn:
    """Below each card is room for the words on what goes back from it."""
    width = max(face.size[0] for face in faces.values())
    boxes: dict[str, Rectangle] = {}
    tops: dict[str, float] = {}
    y = 0.0
    for node in _downwards(graph):
        if node.region != graph.regions[0].name and node.region not in tops:
            tops[node.region] = y
            y += FRAME_TOP + LINE * len(rule_parts(graph.region(node.region)))
        boxes[node.name] = Rectangle(0, y, width, faces[node.name].size[1])
        y = boxes[node.name].bottom + NOTE * len(_notes(node.name, backwards, width)) + GAP
    frames = {
        region: Rectangle(-FRAME_PAD, top, width + 2 * FRAME_PAD, _middle(boxes[region]) - top)
        for region, top in tops.items()
    }
    return OneColumn(boxes, frames, width, y - GAP)


def rule_parts(region: Region) -> list[str]:
    """The rule of a region in lines that fit above cards."""
    return words.rule(region).split(", ")


def _downwards(graph: Graph) -> Iterator[Node]:
    """In the order of a step; the nodes of a region together, before its outlet."""
    for node in graph.inside(graph.regions[0].name):
        if node.op == "repeat":
            yield from graph.inside(node.name)
        yield node


def _middle(box: Rectangle) -> float:
    return box.y + box.height / 2


def column_lines(
    graph: Graph,
    values: Sequence[Connection],
    backwards: Sequence[Feedback],
    at: OneColumn,
    cards: Mapping[str, Card],
    lowering: Lowering,
) -> Drawing:
    down, right = _value_lines(graph, values, at, cards, lowering)
    up, left = _feedback_lines(graph, backwards, at, cards, lowering)
    return Drawing((*up, *down), tuple(_labels(graph, backwards, at)), left, right, at.height)


def _value_lines(
    graph: Graph,
    lines: Sequence[Connection],
    at: OneColumn,
    cards: Mapping[str, Card],
    lowering: Lowering,
) -> tuple[list[DrawnLine], float]:
    """Lines and how far they reach. All lines of a value share a lane; derived ones are drawn first."""
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    for line in lines:
        source, value, y = line.link.source, line.link.value, at.boxes[line.link.target].y
        start = cards[source].ports.get(value, _middle(at.boxes[source]))
        spans[source, value] = start, max(y + LINE, spans.get((source, value), (start, y))[1])
    lanes = _lanes(spans)
    drawn: list[DrawnLine] = []
    for node in graph.nodes:
        own = [line for line in lines if line.link.target == node.name]
        # The line of an inner lane enters above one of an outer lane: so they do not cross.
        own.sort(key=lambda line: lanes[line.link.source, line.link.value])
        entries = _entries(at.boxes[node.name], cards[node.name], len(own))
        for line, y in zip(own, entries, strict=True):
            key = line.link.source, line.link.value
            x = at.width + TO_LANES + LANE * lanes[key]
            points = [(at.width, spans[key][0]), (x, spans[key][0]), (x, y), (at.width, y)]
            head = arrow_head(points[-1], leftwards=True)
            drawn.append(value_line(graph, node, line, corners(points), head, lowering))
    reach = max((TO_LANES + LANE * lane for lane in lanes.values()), default=0)
    return sorted(drawn, key=lambda line: line.colour != FAINT), at.width + reach


def _entries(box: Rectangle, card: Card, count: int) -> list[float]:
    """Heights at which so many lines enter a card, above where its values leave."""
    bottom = min(card.ports.values(), default=box.bottom) - ENTRY
    apart = min(APART, (bottom - box.y - ENTRY) / max(1, count - 1))
    return [box.y + ENTRY + apart * number for number in range(count)]


def _feedback_lines(
    graph: Graph,
    backwards: Sequence[Feedback],
    at: OneColumn,
    cards: Mapping[str, Card],
    lowering: Lowering,
) -> tuple[list[DrawnLine], float]:
    """Lines and how far to the left they reach."""
    starts = {f: cards[f.source].ports.get(f.port, at.boxes[f.source].bottom - EXIT) for f in backwards}
    tops = {f: [at.boxes[target].y for target in f.targets] for f in backwards}
    lanes = _lanes({f: (min(starts[f], *tops[f]), max(starts[f], *tops[f])) for f in backwards})
    colours = model_colours(graph)
    drawn: list[DrawnLine] = []
    for feedback, lane in lanes.items():
        x, start = float(-TO_LANES - LANE * lane), starts[feedback]
        colour = colours[feedback.model][1] if feedback.model else MUTED
        for target in feedback.targets:
            earlier = sum(target in f.targets for f in backwards[: backwards.index(feedback)])
            y = at.boxes[target].y + ENTRY + APART * earlier
            points: list[Point] = [(0, start), (x, start), (x, y), (0, y)]
            lowered = lowering(feedback.source, target) if feedback.model else ""
            drawn.append(feedback_line(feedback, target, points, colour, lowered))
    return drawn, -float(max((TO_LANES + LANE * lane for lane in lanes.values()), default=0))


def _notes(name: str, backwards: Sequence[Feedback], width: float) -> list[tuple[Feedback, str]]:
    """What goes back from a card, in lines that are no wider than the card."""
    letters = int(width / text_width(" ", LABEL_SIZE))
    own = (feedback for feedback in backwards if feedback.source == name)
    return [(feedback, line) for feedback in own for line in wrap(feedback.label, letters)]


def _labels(graph: Graph, backwards: Sequence[Feedback], at: OneColumn) -> Iterator[Label]:
    """The notes below each card."""
    colours = model_colours(graph)
    for name, box in at.boxes.items():
        for number, (feedback, line) in enumerate(_notes(name, backwards, at.width), 1):
            colour = colours[feedback.model][1] if feedback.model else MUTED
            yield Label(0, box.bottom + NOTE * number - 1, line, colour, LABEL_SIZE, halo=True)


def _lanes(spans: Mapping[Spanning, tuple[float, float]]) -> dict[Spanning, int]:
    """A lane for each span such that those of one lane do not meet: short ones next to the cards."""
    taken: list[list[tuple[float, float]]] = []
    lanes: dict[Spanning, int] = {}
    for key in sorted(spans, key=lambda key: spans[key][1] - spans[key][0]):
        top, bottom = spans[key]
        free = (n for n, used in enumerate(taken) if all(bottom < a or b < top for a, b in used))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((top, bottom))
        lanes[key] = lane
    return lanes
