"""A graph, or a graph with its plan, as SVG: cards by model colour, typed edges, weights as dashes.

Pure text, without scripts or outside resources, so that it shows in notebooks, in a README and in the
report alike, on light and on dark pages. Hovering a line shows its type and, in a plan, what it was
lowered to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hflow import units
from hflow.graph.ir import Graph, Node
from hflow.plan.edges import Edge
from hflow.plan.plan import Plan
from hflow.view import words
from hflow.view.picture.arrangement import FRAME_PAD, Arrangement, arranged
from hflow.view.picture.cards import (
    LINE,
    NAME_SIZE,
    PAD,
    Card,
    Face,
    Label,
    card,
    face,
    kind,
    legend,
    text_width,
)
from hflow.view.picture.connections import connections, feedbacks
from hflow.view.picture.layout import Rectangle
from hflow.view.picture.lines import Drawing, Lowering, feedback_lines, value_lines
from hflow.view.picture.one_column import column_lines, one_column, rule_parts
from hflow.view.picture.palette import INK, MUTED, PAPER, node_colours
from hflow.view.picture.rendering import render

MARGIN = 16


@dataclass(frozen=True)
class Frame:
    """The border around the nodes of a region."""

    box: Rectangle
    tooltip: str
    texts: tuple[Label, ...]


def graph_svg(graph: Graph, narrow: bool = False) -> str:
    """The algorithm: what is computed, and what it is made of; `narrow`: all cards below each other."""
    return _draw(_Picture(graph, graph.name, kind, lambda source, target: ""), narrow)


def plan_svg(plan: Plan, narrow: bool = False) -> str:
    """The algorithm with what the plan says of each node and edge; `narrow`: all cards below each other."""

    def lines(node: Node) -> tuple[str, ...]:
        at = plan.node(node.name)
        took = ", ".join(filter(None, (units.seconds(at.time_s), words.marks(at))))
        return (*kind(node), f"{at.engine} {at.mesh}", took)

    def lowering(source: str, target: str) -> str:
        return "\n".join(_lowered(e) for e in plan.step.edges if (e.source, e.target) == (source, target))

    return _draw(_Picture(plan.graph, f"{plan.graph.name} on {plan.cluster.name}", lines, lowering), narrow)


def _lowered(edge: Edge) -> str:
    cost = f"{units.size(edge.size_bytes)}, {units.seconds(edge.time_s)}"
    return f"{edge.collective}: {edge.source_mesh} to {edge.target_mesh}, {cost}"


@dataclass(frozen=True)
class _Picture:
    """`lines`: what stands on the card of a node; `lowering`: what a plan says of an edge."""

    graph: Graph
    title: str
    lines: Callable[[Node], tuple[str, ...]]
    lowering: Lowering


def _draw(picture: _Picture, narrow: bool) -> str:
    graph = picture.graph
    faces = {node.name: face(graph, node, picture.lines(node)) for node in graph.nodes}
    drawing, cards, frames = _below_each_other(picture, faces) if narrow else _side_by_side(picture, faces)
    chips, top = legend(graph, drawing.right - drawing.left)
    width = max([drawing.right - drawing.left, *(text.right for chip in chips for text in chip.texts)])
    return render(
        "graph.svg",
        title=picture.title,
        paper=PAPER,
        margin=MARGIN,
        left=MARGIN - drawing.left,
        top=MARGIN + top,
        width=round(width) + 2 * MARGIN,
        height=round(top + drawing.bottom) + 2 * MARGIN,
        chips=chips,
        frames=frames,
        lines=drawing.lines,
        labels=drawing.labels,
        cards=cards,
    )


_Parts = tuple[Drawing, list[Card], list[Frame]]


def _side_by_side(picture: _Picture, faces: Mapping[str, Face]) -> _Parts:
    """In columns from left to right."""
    graph, lowering = picture.graph, picture.lowering
    values, backwards = connections(graph), feedbacks(graph)
    at = arranged(graph, faces, values, backwards)
    cards = _cards(graph, faces, at.boxes)
    reserved = frozenset(target for f in backwards for target in f.targets)
    below = feedback_lines(graph, backwards, at, cards, lowering)
    lines = (*below.lines, *value_lines(graph, values, at, cards, lowering, reserved))
    frames = [_frame(graph, name, _to_outlet(at, name)) for name in at.frames]
    return replace(below, lines=lines), list(cards.values()), frames


def _to_outlet(at: Arrangement, region: str) -> Rectangle:
    """A frame whose outlet, the card of the region's own node, stands on the right border."""
    return replace(at.frames[region], width=at.frames[region].width - at.boxes[region].width / 2)


def _below_each_other(picture: _Picture, faces: Mapping[str, Face]) -> _Parts:
    """In one column."""
    graph, backwards = picture.graph, feedbacks(picture.graph)
    at = one_column(graph, faces, backwards)
    cards = _cards(graph, faces, at.boxes)
    drawing = column_lines(graph, connections(graph), backwards, at, cards, picture.lowering)
    return drawing, list(cards.values()), [_narrow_frame(graph, *frame) for frame in at.frames.items()]


def _cards(graph: Graph, faces: Mapping[str, Face], boxes: Mapping[str, Rectangle]) -> dict[str, Card]:
    colours = node_colours(graph)
    return {name: card(shown, boxes[name], colours[name]) for name, shown in faces.items()}


def _frame(graph: Graph, name: str, box: Rectangle) -> Frame:
    """With the name of the region, and its rule beside it."""
    x, y = box.x + FRAME_PAD - 12, box.y + 26
    after_name = round(x + text_width(name, NAME_SIZE) + 12)
    rule = Label(after_name, y, words.rule(graph.region(name)), MUTED)
    return Frame(box, _about(graph, name), (Label(x, y, name, INK, NAME_SIZE, bold=True), rule))


def _narrow_frame(graph: Graph, name: str, box: Rectangle) -> Frame:
    """With the name of the region, and its rule below it."""
    x, y = box.x + PAD, box.y + 22
    parts = enumerate(rule_parts(graph.region(name)), 1)
    rule = (Label(x, y + LINE * number, part, MUTED) for number, part in parts)
    return Frame(box, _about(graph, name), (Label(x, y, name, INK, NAME_SIZE, bold=True), *rule))


def _about(graph: Graph, name: str) -> str:
    short = graph.node(name).options.get("short", "")
    return f"{name}: {words.rule(graph.region(name))}; too few rows: {short}"
