"""A graph, or a graph with its plan, as SVG: cards by model colour, typed edges, weights as dashes.

Pure text, without scripts or outside resources, so that it shows in notebooks, in a README and in the
report alike, on light and on dark pages. Hovering a line shows its type and, in a plan, what it was
lowered to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hflow import units
from hflow.graph.ir import Graph, Node, Region
from hflow.plan.edges import Edge
from hflow.plan.plan import Plan
from hflow.view import words
from hflow.view.picture.arrangement import FRAME_PAD, Arrangement, arranged
from hflow.view.picture.cards import NAME_SIZE, Label, card, face, kind, legend, text_width
from hflow.view.picture.connections import connections, feedbacks
from hflow.view.picture.layout import Rectangle
from hflow.view.picture.lines import Lowering, feedback_lines, value_lines
from hflow.view.picture.palette import INK, MUTED, PAPER, node_colours
from hflow.view.picture.rendering import render

MARGIN = 16


@dataclass(frozen=True)
class Frame:
    """The border around the nodes of a region."""

    box: Rectangle
    tooltip: str
    texts: tuple[Label, ...]


def graph_svg(graph: Graph) -> str:
    """The algorithm: what is computed, and what it is made of."""
    return _draw(graph, graph.name, kind, lambda source, target: "")


def plan_svg(plan: Plan) -> str:
    """The algorithm with what the plan says about each node and edge."""

    def lines(node: Node) -> tuple[str, ...]:
        at = plan.node(node.name)
        took = ", ".join(filter(None, (units.seconds(at.time_s), words.marks(at))))
        return (*kind(node), f"{at.engine} {at.mesh}", took)

    def lowering(source: str, target: str) -> str:
        return "\n".join(_lowered(e) for e in plan.step.edges if (e.source, e.target) == (source, target))

    return _draw(plan.graph, f"{plan.graph.name} on {plan.cluster.name}", lines, lowering)


def _lowered(edge: Edge) -> str:
    cost = f"{units.size(edge.size_bytes)}, {units.seconds(edge.time_s)}"
    return f"{edge.collective}: {edge.source_mesh} to {edge.target_mesh}, {cost}"


def _draw(graph: Graph, title: str, lines: Callable[[Node], tuple[str, ...]], lowering: Lowering) -> str:
    values, backwards = connections(graph), feedbacks(graph)
    faces = {node.name: face(graph, node, lines(node)) for node in graph.nodes}
    at = arranged(graph, faces, values, backwards)
    colours = node_colours(graph)
    cards = {name: card(shown, at.boxes[name], colours[name]) for name, shown in faces.items()}
    reserved = frozenset(target for f in backwards for target in f.targets)
    below = feedback_lines(graph, backwards, at, cards, lowering)
    width = below.right - below.left
    chips, top = legend(graph, width)
    return render(
        "graph.svg",
        title=title,
        paper=PAPER,
        margin=MARGIN,
        left=MARGIN - below.left,
        top=MARGIN + top,
        width=round(width) + 2 * MARGIN,
        height=round(top + below.bottom) + 2 * MARGIN,
        chips=chips,
        frames=[_frame(graph.region(name), graph.node(name), at) for name in at.frames],
        lines=[*below.lines, *value_lines(graph, values, at, cards, lowering, reserved)],
        labels=below.labels,
        cards=list(cards.values()),
    )


def _frame(region: Region, node: Node, at: Arrangement) -> Frame:
    """Its outlet, the card of the region's own node, stands on the right border."""
    whole, outlet = at.frames[region.name], at.boxes[region.name]
    box = replace(whole, width=whole.width - outlet.width / 2)
    x, y = box.x + FRAME_PAD - 12, box.y + 26
    rule = words.rule(region)
    short = str(node.options.get("short", ""))
    after_name = round(x + text_width(region.name, NAME_SIZE) + 12)
    texts = (Label(x, y, region.name, INK, NAME_SIZE, bold=True), Label(after_name, y, rule, MUTED))
    return Frame(box, f"{region.name}: {rule}; too few rows: {short}", texts)
