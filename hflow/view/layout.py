"""Layered layout of a directed acyclic graph, left to right (Sugiyama, Tagawa & Toda 1981).

Three steps: a layer per node, dummies where an edge crosses a layer, and an order inside each layer
by barycentres, which keeps crossings few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

Point = tuple[float, float]
Slot = str | tuple[str, str, int]  # a node, or the place where an edge crosses a layer
DUMMY_HEIGHT = 10.0


@dataclass(frozen=True)
class Box:
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


@dataclass(frozen=True)
class Layering:
    """`boxes` by node; `bends`: the points that an edge passes between its two nodes."""

    boxes: Mapping[str, Box]
    bends: Mapping[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def layered(
    dag: nx.DiGraph[str], sizes: Mapping[str, tuple[float, float]], gap_x: float = 64, gap_y: float = 24
) -> Layering:
    """Place boxes of the given (width, height); coordinates start at (0, 0)."""
    layer = _layers(dag)
    chains = {(u, v): _chain(u, v, layer) for u, v in dag.edges}
    graph: nx.DiGraph[Slot] = nx.DiGraph()
    graph.add_nodes_from(dag.nodes)
    for chain in chains.values():
        graph.add_edges_from(pairwise(chain))
    columns = _ordered(graph, layer)
    boxes = _placed(columns, sizes, gap_x, gap_y)
    bends = {edge: _bends(chain, boxes) for edge, chain in chains.items()}
    nodes = {node: boxes[node] for node in dag.nodes}
    width = max((b.right for b in nodes.values()), default=0.0)
    return Layering(nodes, bends, width, max((b.bottom for b in boxes.values()), default=0.0))


def _layers(dag: nx.DiGraph[str]) -> dict[str, int]:
    """The longest path from a source; sources are pulled next to their first reader."""
    layer = {n: i for i, nodes in enumerate(nx.topological_generations(dag)) for n in nodes}
    for node in dag.nodes:
        if dag.in_degree(node) == 0 and dag.out_degree(node) > 0:
            layer[node] = min(layer[reader] for reader in dag.successors(node)) - 1
    return layer


def _chain(source: str, target: str, layer: Mapping[str, int]) -> list[Slot]:
    dummies = [(source, target, at) for at in range(layer[source] + 1, layer[target])]
    return [source, *dummies, target]


def _ordered(graph: nx.DiGraph[Slot], layer: Mapping[str, int], sweeps: int = 8) -> list[list[Slot]]:
    columns: list[list[Slot]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for slot in graph.nodes:
        columns[slot[2] if isinstance(slot, tuple) else layer[slot]].append(slot)
    position = {slot: i / len(column) for column in columns for i, slot in enumerate(column)}
    for sweep in range(sweeps):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            _sort(graph, column, position, forward)
    return columns


def _sort(graph: nx.DiGraph[Slot], column: list[Slot], position: dict[Slot, float], forward: bool) -> None:
    """Sort one column in place by the mean position of its neighbours in the column before."""
    mean: dict[Slot, float] = {}
    for slot in column:
        near = list(graph.predecessors(slot) if forward else graph.successors(slot))
        mean[slot] = sum(position[n] for n in near) / len(near) if near else position[slot]
    column.sort(key=mean.__getitem__)
    position.update({slot: i / len(column) for i, slot in enumerate(column)})


def _placed(
    columns: list[list[Slot]], sizes: Mapping[str, tuple[float, float]], gap_x: float, gap_y: float
) -> dict[Slot, Box]:
    extents = {s: sizes[s] if isinstance(s, str) else (0.0, DUMMY_HEIGHT) for c in columns for s in c}
    heights = [sum(extents[s][1] for s in column) + gap_y * (len(column) - 1) for column in columns]
    boxes: dict[Slot, Box] = {}
    x = 0.0
    for column, height in zip(columns, heights):
        width = max(extents[slot][0] for slot in column)
        y = (max(heights) - height) / 2
        for slot in column:
            own_width, own_height = extents[slot]
            boxes[slot] = Box(x, y, own_width or width, own_height)
            y += own_height + gap_y
        x += width + gap_x
    return boxes


def _bends(chain: list[Slot], boxes: Mapping[Slot, Box]) -> tuple[Point, ...]:
    """Straight through the middle of each dummy, from its left end to its right end."""
    crossed = [boxes[slot] for slot in chain[1:-1]]
    return tuple((x, b.y + b.height / 2) for b in crossed for x in (b.x, b.right))
