"""What a notebook shows for a graph or a plan: a picture, and text where pictures do not show."""

from __future__ import annotations

from hflow.compiler.plan import Plan
from hflow.graph.graph import Graph
from hflow.view.svg import graph_svg, plan_svg
from hflow.view.terminal import plan_text


def graph_bundle(graph: Graph) -> dict[str, str]:
    """MIME bundle of a graph; the text has one line per node with the types it makes."""
    head = f"graph {graph.name}: {graph.doc}".rstrip(": ")
    lines = [
        f"  {node.name:<16} {node.op:<9} {', '.join(f'{o.port}: {o.type}' for o in node.outputs)}".rstrip()
        for node in graph.nodes
    ]
    return {"image/svg+xml": graph_svg(graph), "text/plain": "\n".join([head, *lines])}


def plan_bundle(plan: Plan) -> dict[str, str]:
    """MIME bundle of a plan; the text is its table."""
    return {"image/svg+xml": plan_svg(plan), "text/plain": plan_text(plan)}
