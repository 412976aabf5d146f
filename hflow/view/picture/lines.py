"""The lines of a graph's picture: values and orders to the right, weights and carried scalars back below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hflow.graph.ir import Graph, Node
from hflow.view.picture.arrangement import CHANNEL, FRAME_BOTTOM, LOOP, Arrangement, entering
from hflow.view.picture.cards import Card, Label
from hflow.view.picture.connections import Connection, Feedback
from hflow.view.picture.layout import Point
from hflow.view.picture.palette import EDGE, FAINT, MUTED, model_colours
from hflow.view.picture.paths import arrow_head, corners, curve

LANE = 26  # distance between two lines below the cards
LABEL_SIZE = 11
ENTRY, EXIT = 12, 13  # how far above the bottom of a card what goes back enters and leaves it
Lowering = Callable[[str, str], str]  # what a plan says of the edges from one node to another


@dataclass(frozen=True)
class DrawnLine:
    path: str
    head: str
    title: str
    colour: str
    width: float = 1.4
    dash: str = ""


@dataclass(frozen=True)
class Drawing:
    """Lines, the words on them, and how far to the left, to the right and down they reach."""

    lines: tuple[DrawnLine, ...]
    labels: tuple[Label, ...]
    left: float
    right: float
    bottom: float


def value_lines(
    graph: Graph,
    lines: Sequence[Connection],
    at: Arrangement,
    cards: Mapping[str, Card],
    lowering: Lowering,
    reserved: frozenset[str],
) -> tuple[DrawnLine, ...]:
    """Lines to the right. Into a card of `reserved` nothing goes near its bottom."""
    drawn: list[DrawnLine] = []
    for node in graph.nodes:
        own = [line for line in lines if line.link.target == node.name]
        starts = {line: _start(line, at, cards) for line in own}
        own.sort(key=lambda line: _arrival(starts[line], at.bends[line.link]))
        box = at.boxes[node.name]
        usable = box.height - (2 * ENTRY if node.name in reserved else 0)
        for number, line in enumerate(own, 1):
            end = (box.x, box.y + usable * number / (len(own) + 1))
            path = curve([*starts[line], *at.bends[line.link], end])
            drawn.append(value_line(graph, node, line, path, arrow_head(end), lowering))
    return tuple(sorted(drawn, key=lambda line: line.colour != FAINT))


def _start(line: Connection, at: Arrangement, cards: Mapping[str, Card]) -> tuple[Point, ...]:
    """Out of the right of a card and on to the end of its column (or of its frame's, seen from outside)."""
    name, box = line.link.source, at.boxes[line.link.source]
    y = cards[name].ports.get(line.link.value, box.y + box.height / 2)
    right = at.columns[name][1]
    return ((box.right, y), (right, y)) if right - box.right > 1 else ((box.right, y),)


def _arrival(start: Sequence[Point], bends: Sequence[Point]) -> tuple[float, float]:
    """The height from which a line comes to its end: lines enter a card in that order, so that few cross."""
    return [*start, *bends][-1][1], start[0][1]


def value_line(
    graph: Graph, node: Node, line: Connection, path: str, head: str, lowering: Lowering
) -> DrawnLine:
    """A value into `node`, or an order, with its types and what a plan says of it."""
    says = [f"{i.source} -> {node.name}.{i.port}: {i.type}" for i in line.inputs]
    order = f"{line.link.target} after {line.link.source}"
    title = "\n".join(filter(None, (*(says or [order]), lowering(line.link.source, node.name))))
    if not line.inputs:
        first = graph.node(line.link.source).model
        same = first and node.model and first.model == node.model.model
        colour = model_colours(graph)[first.model][1] if first and same else MUTED
        return DrawnLine(path, head, title, colour, 1.4, "1.5 4")
    return DrawnLine(path, head, title, *((FAINT, 1.2) if line.derived else (EDGE, 1.4)))


@dataclass
class _Upright:
    """Places for upright lines beside columns: the first nearest to the column, the next further away."""

    taken: Counter[float] = field(default_factory=Counter[float])

    def left_of(self, x: float) -> float:
        self.taken[-x] += 1
        return x - 13 - 7 * self.taken[-x]

    def right_of(self, x: float) -> float:
        self.taken[x] += 1
        return x + 7 + 7 * self.taken[x]


@dataclass(frozen=True)
class _Way:
    """How a feedback goes: `uprights` are the places beside columns at which it goes down or up."""

    feedback: Feedback
    start: Point
    down: float
    ups: Mapping[str, float]

    @property
    def uprights(self) -> list[float]:
        return sorted([self.down, *self.ups.values()])


def feedback_lines(
    graph: Graph,
    backwards: Sequence[Feedback],
    at: Arrangement,
    cards: Mapping[str, Card],
    lowering: Lowering,
) -> Drawing:
    """A lane below all cards for each feedback, the longest lowest; a loop where a node reads itself."""
    upright = _Upright()
    drawn = [*_own_loops(backwards, at, cards, upright)]
    lines, labels = [line for line, _ in drawn], [label for _, label in drawn]
    around = sorted((f for f in backwards if not f.own), key=lambda f: _length(f, at))
    ways = [_way(graph, f, at, cards, upright) for f in around]
    colours = model_colours(graph)
    for number, way in enumerate(ways):
        lane = at.height + LANE * (number + 1)
        colour = colours[way.feedback.model][1] if way.feedback.model else MUTED
        for target in way.feedback.targets:
            points = _points(graph, way, target, lane, at, backwards, upright)
            lowered = lowering(way.feedback.source, target) if way.feedback.model else ""
            lines.append(feedback_line(way.feedback, target, points, colour, lowered))
        crossed = sorted({x for below in ways[number:] for x in below.uprights})
        labels.append(_label(way, lane, crossed, colour))
    uprights = [x for way in ways for x in way.uprights]
    bottom = at.height + LANE * len(ways)
    return Drawing(tuple(lines), tuple(labels), min(0, *uprights, 0), max(at.width, *uprights, 0), bottom)


def _length(feedback: Feedback, at: Arrangement) -> float:
    """How far back it goes: the shorter ones run inside of the longer ones."""
    return at.boxes[feedback.source].right - min(at.boxes[t].x for t in feedback.targets)


def _region(graph: Graph, name: str) -> str | None:
    region = graph.node(name).region
    return None if region == graph.regions[0].name else region


def _way(
    graph: Graph, feedback: Feedback, at: Arrangement, cards: Mapping[str, Card], upright: _Upright
) -> _Way:
    box = at.boxes[feedback.source]
    y = cards[feedback.source].ports[feedback.port] if feedback.port else box.bottom - EXIT
    holders = {t: _region(graph, t) or t for t in feedback.targets}
    lefts = {x: upright.left_of(x) for x in sorted({at.columns[h][0] for h in holders.values()})}
    ups = {target: lefts[at.columns[holder][0]] for target, holder in holders.items()}
    return _Way(feedback, (box.right, y), upright.right_of(at.columns[feedback.source][1]), ups)


def _points(
    graph: Graph,
    way: _Way,
    target: str,
    lane: float,
    at: Arrangement,
    backwards: Sequence[Feedback],
    upright: _Upright,
) -> list[Point]:
    """Out to the right, down to the lane, back, up beside the target's column (or frame), and into it."""
    box, up = at.boxes[target], way.ups[target]
    y = box.bottom - ENTRY
    trunk = [way.start, (way.down, way.start[1]), (way.down, lane), (up, lane)]
    region = _region(graph, target)
    if not region:
        return [*trunk, (up, y), (box.x, y)]
    number = entering(graph, region, backwards).index(way.feedback)
    channel = at.frames[region].bottom - FRAME_BOTTOM - CHANNEL * number
    inner = upright.left_of(at.columns[target][0])
    return [*trunk, (up, channel), (inner, channel), (inner, y), (box.x, y)]


def feedback_line(
    feedback: Feedback, target: str, points: Sequence[Point], colour: str, lowered: str
) -> DrawnLine:
    """Into the left of a card."""
    head = f"{feedback.source} => {target}: {feedback.label}"
    title = "\n".join(filter(None, (head, lowered)))
    return DrawnLine(corners(points), arrow_head(points[-1]), title, colour, 1.4, "6 4")


def _label(way: _Way, lane: float, crossed: Sequence[float], colour: str) -> Label:
    """In the middle of the widest piece of the lane that no upright line crosses."""
    first, last = way.uprights[0], way.uprights[-1]
    pieces = list(pairwise(x for x in crossed if first <= x <= last))
    start, end = max(pieces, key=lambda piece: piece[1] - piece[0])
    return Label(
        round((start + end) / 2), lane - 6, way.feedback.label, colour, LABEL_SIZE, anchor="middle", halo=True
    )


def _own_loops(
    backwards: Sequence[Feedback], at: Arrangement, cards: Mapping[str, Card], upright: _Upright
) -> Iterator[tuple[DrawnLine, Label]]:
    """Out of the right of a card, below it, and into its left; with the words below."""
    loops = [f for f in backwards if f.own]
    for number, loop in enumerate(loops):
        name = loop.source
        box, (first, last) = at.boxes[name], at.columns[name]
        earlier = sum(f.source == name for f in loops[:number])
        low, into = box.bottom + 14 + LOOP * earlier, box.bottom - ENTRY
        start = (box.right, cards[name].ports[loop.port])
        right, left = upright.right_of(last), upright.left_of(first)
        points = [start, (right, start[1]), (right, low), (left, low), (left, into), (box.x, into)]
        label_at = (round(box.x + box.width / 2), low + 13)
        label = Label(*label_at, loop.label, MUTED, LABEL_SIZE, anchor="middle", halo=True)
        yield feedback_line(loop, name, points, MUTED, ""), label
