"""A graph, or a graph with its plan, as SVG: cards by model colour, typed edges, weights as dashes.

Pure text, without scripts or outside resources, so that it shows in notebooks, in a README and in the
report alike. Hovering an edge shows its type and, in a plan, what it was lowered to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hflow.compiler.plan import EdgePlan, Plan
from hflow.graph.graph import Graph, Node, Ref
from hflow.graph.types import ValueType
from hflow.view import units
from hflow.view.layout import Box, Layering, Point, layered
from hflow.view.palette import Colours, model_colours, node_colours
from hflow.view.rendering import render

CHAR = 7.3  # width of a character of 12 px monospace
LINE = 17
PAD = 12.0
MARGIN = 16.0
LANE = 28  # distance between two weight edges below the cards
INK, MUTED, EDGE = "#1d2433", "#667085", "#98a2b3"


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    content: str
    fill: str
    bold: bool = False


@dataclass(frozen=True)
class Card:
    """One node. `ports` maps each output to the height at which its edges leave."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str
    tooltip: str
    texts: tuple[Text, ...]
    ports: Mapping[str, float]


@dataclass(frozen=True)
class Edge:
    path: str
    title: str
    colour: str = EDGE
    width: float = 1.4
    dashed: bool = False
    label: str = ""
    label_x: float = 0
    label_y: float = 0


def graph_svg(graph: Graph) -> str:
    """The algorithm: what is computed, and what it is made of."""
    return _draw(graph, graph.name, lambda node: [_kind(node)], lambda source, target: "")


def plan_svg(plan: Plan) -> str:
    """The algorithm with what the plan says about each node and edge."""

    def lines(node: Node) -> list[str]:
        at = plan.node(node.name)
        return [_kind(node), f"{at.engine} {at.mesh}", units.seconds(at.time_s)]

    def lowering(source: str, target: str) -> str:
        return "\n".join(_lowered(e) for e in plan.step.edges if (e.source, e.target) == (source, target))

    return _draw(plan.graph, f"{plan.graph.name} on {plan.cluster.name}", lines, lowering)


def _kind(node: Node) -> str:
    if node.function and node.op == "call":
        return f"call {node.function.reference.rpartition('.')[2]}"
    return f"{node.op} {node.model.model}" if node.model else node.op


def _lowered(edge: EdgePlan) -> str:
    cost = f"{units.size(edge.size_bytes)}, {units.seconds(edge.time_s)}"
    return f"{edge.collective}: {edge.source_mesh} to {edge.target_mesh}, {cost}"


def _draw(
    graph: Graph,
    title: str,
    lines: Callable[[Node], list[str]],
    lowering: Callable[[str, str], str],
) -> str:
    heads = {node.name: lines(node) for node in graph.nodes}
    sizes = {node.name: _card_size(node, heads[node.name]) for node in graph.nodes}
    layering = layered(graph.dag(), sizes)
    colours = node_colours(graph)
    cards = {n.name: _card(n, heads[n.name], layering.boxes[n.name], colours[n.name]) for n in graph.nodes}
    data = list(_data_edges(graph, layering, cards, lowering))
    weights = list(_weight_edges(graph, layering, lowering))
    return render(
        "graph.svg",
        title=title,
        width=round(layering.width + 2 * MARGIN + (LANE if weights else 0)),
        height=round(layering.height + 2 * MARGIN + LANE * len(weights)),
        cards=list(cards.values()),
        edges=[*weights, *data],
    )


def _port_text(name: str, value: ValueType) -> str:
    return f"{name}: {_bare(value)}"


def _bare(value: ValueType) -> str:
    """A type without its provenance, which only the tooltip has room for."""
    return f"{value.dtype}[{', '.join(map(str, value.dims))}]"


def _card_size(node: Node, head: Sequence[str]) -> tuple[float, float]:
    texts = [f"{node.name} ", *head, *(_port_text(o.port, o.type) for o in node.outputs)]
    ports = LINE * len(node.outputs) + (8 if node.outputs else 0)
    return max(map(len, texts)) * CHAR + 2 * PAD, LINE * (1 + len(head)) + ports + PAD


def _card(node: Node, head: Sequence[str], box: Box, colours: Colours) -> Card:
    x, y = round(box.x + MARGIN + PAD), round(box.y + MARGIN + LINE + 1)
    texts = [Text(x, y, node.name, INK, bold=True)]
    for i, line in enumerate(head, 1):
        texts.append(Text(x, y + LINE * i, line, colours[1]))
    ports: dict[str, float] = {}
    for i, output in enumerate(node.outputs, 1):
        at = y + LINE * (len(head) + i) + 8
        texts.append(Text(x, at, _port_text(output.port, output.type), MUTED))
        ports[output.port] = at - 4
    place = (round(box.x + MARGIN), round(box.y + MARGIN), round(box.width), round(box.height))
    return Card(*place, *colours, _tooltip(node), tuple(texts), ports)


def _tooltip(node: Node) -> str:
    function = [node.function.reference] if node.function else []
    options = [f"{name}: {value}" for name, value in node.options.items()]
    return "\n".join([f"{node.name}: {_kind(node)}", *function, *options])


def _data_edges(
    graph: Graph, layering: Layering, cards: Mapping[str, Card], lowering: Callable[[str, str], str]
) -> Iterator[Edge]:
    for node in graph.nodes:
        box = layering.boxes[node.name]
        within_step = [i for i in node.inputs if i.lag == 0]
        inputs = sorted(within_step, key=lambda i: _entry(i.source, layering, cards))
        for number, value in enumerate(inputs, 1):
            source = value.source
            start = (layering.boxes[source.node].right + MARGIN, cards[source.node].ports[source.port])
            bends = [(x + MARGIN, y + MARGIN) for x, y in layering.bends[source.node, node.name]]
            end = (box.x + MARGIN, box.y + MARGIN + box.height * number / (len(inputs) + 1))
            title = f"{source} -> {node.name}.{value.port}: {value.type}"
            title = "\n".join(filter(None, (title, lowering(source.node, node.name))))
            yield Edge(_curve([start, *bends, end]), title)


def _entry(source: Ref, layering: Layering, cards: Mapping[str, Card]) -> tuple[float, float]:
    """Where an edge comes from: edges enter a card in that order, so that few of them cross."""
    box = layering.boxes[source.node]
    return (box.y + box.height / 2, cards[source.node].ports[source.port])


def _weight_edges(graph: Graph, layering: Layering, lowering: Callable[[str, str], str]) -> Iterator[Edge]:
    """From each train node back to the nodes that read its model, one lane each, under all cards."""
    colours = model_colours(graph)
    readers = [n for n in graph.nodes if n.op in ("generate", "score") and n.model]
    pairs = [(t, r) for r in readers if r.model for t in graph.trainers(r.model.model)]
    for number, (trainer, reader) in enumerate(pairs, 1):
        assert reader.model is not None
        lane = layering.height + MARGIN + LANE * (number - 0.3)
        start, end = layering.boxes[trainer.name], layering.boxes[reader.name]
        age = f"{1 + reader.model.lag} steps later" if reader.model.lag else "next step"
        label = f"{reader.model.model} weights, {age}"
        title = "\n".join(filter(None, (label, lowering(trainer.name, reader.name))))
        yield Edge(
            _loop(start, end, lane),
            f"{trainer.name} => {reader.name}: {title}",
            colours[reader.model.model][1],
            dashed=True,
            label=label,
            label_x=round((start.x + end.x + end.width) / 2 + MARGIN),
            label_y=round(lane - 6),
        )


def _curve(points: Sequence[Point]) -> str:
    """Through all points, level at each."""
    path = [f"M{points[0][0]:.0f} {points[0][1]:.0f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        path.append(f"C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}")
    return "".join(path)


def _loop(start: Box, end: Box, lane: float, radius: float = 9) -> str:
    """Out of the right of `start`, down to the lane, back, and into the left of `end`."""
    x0, y0 = start.right + MARGIN, start.bottom + MARGIN - 14
    x1, y1 = end.x + MARGIN, end.bottom + MARGIN - 12
    right, left, r = x0 + 16, x1 - 20, radius
    return (
        f"M{x0:.0f} {y0:.0f}H{right - r:.0f}Q{right:.0f} {y0:.0f} {right:.0f} {y0 + r:.0f}"
        f"V{lane - r:.0f}Q{right:.0f} {lane:.0f} {right - r:.0f} {lane:.0f}"
        f"H{left + r:.0f}Q{left:.0f} {lane:.0f} {left:.0f} {lane - r:.0f}"
        f"V{y1 + r:.0f}Q{left:.0f} {y1:.0f} {left + r:.0f} {y1:.0f}H{x1:.0f}"
    )
