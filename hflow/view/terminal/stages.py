"""The rows of a plan's two tables: nodes with where and how they run, and edges with what they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import assert_never

import networkx as nx

from hflow import units
from hflow.graph.ir import Graph
from hflow.plan.edges import DataEdge, Edge, WeightEdge
from hflow.plan.node_plan import NodePlan
from hflow.view import words
from hflow.view.terminal.table import Column

IN_ROUNDS = "↻ "  # before nodes that run in rounds within a step

STAGE_COLUMNS: tuple[Column, ...] = (
    ("stage", "left"),
    ("model", "left"),
    ("device", "left"),
    ("engine", "left"),
    ("layout", "left"),
    ("start", "right"),
    ("time", "right"),
    ("mem/device", "right"),
)
EDGE_COLUMNS: tuple[Column, ...] = (
    ("edge", "left"),
    ("values", "left"),
    ("size", "right"),
    ("from", "left"),
    ("to", "left"),
    ("lowered to", "left"),
    ("cost", "right"),
)


def stage_rows(graph: Graph, nodes: Iterable[NodePlan]) -> list[tuple[str, ...]]:
    """Nodes by the number of steps of the graph before them; those of one number could overlap."""
    depth = {n: i for i, names in enumerate(nx.topological_generations(graph.dag()), 1) for n in names}
    inner = {region.name for region in graph.regions[1:]}
    rows: list[tuple[str, ...]] = []
    shown = 0
    for node in sorted(nodes, key=lambda n: (depth[n.node], n.start_s)):
        number = " " if depth[node.node] == shown else str(depth[node.node])
        shown = depth[node.node]
        mark = IN_ROUNDS if graph.node(node.node).region in inner else ""
        rows.append((f"{number} {mark}{node.node}", *_stage(node)))
    return rows


def _stage(node: NodePlan) -> tuple[str, ...]:
    return (
        node.model or "-",
        units.devices(node.mesh.devices),
        node.engine,
        words.layout(node),
        f"{node.start_s:.2f}",
        units.seconds(node.time_s),
        units.size(node.memory_bytes),
    )


def edge_rows(graph: Graph, edges: Sequence[Edge], most: int | None = None) -> list[tuple[str, ...]]:
    """Weight edges, then the data edges that move rows; one line for those that stay in place.

    Args:
        most: so many data edges at most, those that take longest; others are counted in the last line.
    """
    weights = [e for e in edges if isinstance(e, WeightEdge)]
    data = [e for e in edges if isinstance(e, DataEdge)]
    moving = sorted((e for e in data if e.collective != "alias"), key=lambda e: -e.time_s)[:most]
    shown = [*weights, *(e for e in data if e in moving)]
    rest = [e for e in data if e not in moving]
    return [*(_row(graph, e) for e in shown), *([_others(rest)] if rest else [])]


def _others(edges: Sequence[DataEdge]) -> tuple[str, ...]:
    """How many, with the number of each way to lower them, where there are several."""
    ways = Counter(e.collective for e in edges)
    lowered = ", ".join(f"{n} {way}" if len(ways) > 1 else way for way, n in sorted(ways.items()))
    size, cost = units.size(sum(e.size_bytes for e in edges)), units.seconds(sum(e.time_s for e in edges))
    return (f"+ {units.plural(len(edges), 'data edge')}", "", size, "", "", lowered, cost)


def _row(graph: Graph, edge: Edge) -> tuple[str, ...]:
    match edge:
        case DataEdge():
            name, values = f"{edge.source} -> {edge.target}", " ".join(edge.ports)
            ends = str(edge.source_layout), str(edge.target_layout)
        case WeightEdge():
            name, values = edge.name, _weights(edge, graph)
            ends = str(edge.source_mesh), str(edge.target_mesh)
        case _:
            assert_never(edge)
    cost = units.seconds(edge.time_s)
    return name, values, units.size(edge.size_bytes), *ends, edge.collective, cost


def _weights(edge: WeightEdge, graph: Graph) -> str:
    reader = graph.node(edge.target)
    age = words.age(graph.model_of(reader), reader.model_use.lag)
    return ", ".join(filter(None, ("weights", age, words.changed(edge.changed))))
