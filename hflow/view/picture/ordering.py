"""Columns of a layered drawing: which node stands in which, and in what order, so that few links cross.

The first two steps of Sugiyama, Tagawa & Toda (1981). Where a link passes a column it has a slot there;
links of one value share their slots, as the branches of a tree share its trunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import networkx as nx


@dataclass(frozen=True)
class GraphLink:
    """`target` reads `value` of `source`."""

    source: str
    target: str
    value: str = ""


@dataclass(frozen=True)
class Passage:
    """The slot in which a value of `source` passes a column."""

    source: str
    value: str
    column: int


Slot = str | Passage
Columns = Sequence[Sequence[Slot]]


@dataclass(frozen=True)
class Wire:
    """A piece of a link, between adjacent columns. `port`: where it leaves `source`, from 0 (top) to 1."""

    source: Slot
    target: Slot
    value: str
    port: float


def column_numbers(nodes: Sequence[str], links: Sequence[GraphLink]) -> dict[str, int]:
    """The longest path from a source; sources are pulled next to their first reader."""
    dag: nx.DiGraph[str] = nx.DiGraph()
    dag.add_nodes_from(nodes)
    dag.add_edges_from((link.source, link.target) for link in links)
    column = {n: i for i, layer in enumerate(nx.topological_generations(dag)) for n in layer}
    for node in nodes:
        if dag.in_degree(node) == 0 and dag.out_degree(node) > 0:
            column[node] = min(column[reader] for reader in dag.successors(node)) - 1
    return column


def chain(link: GraphLink, column: Mapping[str, int]) -> list[Slot]:
    """The slots that a link goes through, its two nodes included."""
    between = range(column[link.source] + 1, column[link.target])
    return [link.source, *(Passage(link.source, link.value, at) for at in between), link.target]


def wires(
    links: Sequence[GraphLink], column: Mapping[str, int], ports: Mapping[tuple[str, str], float]
) -> tuple[Wire, ...]:
    """All pieces of all links, each once."""
    pieces = (
        Wire(*ends, link.value, ports.get((link.source, link.value), 0.5) if number == 0 else 0.5)
        for link in links
        for number, ends in enumerate(pairwise(chain(link, column)))
    )
    return tuple(dict.fromkeys(pieces))


def ordered(column: Mapping[str, int], pieces: Sequence[Wire], sweeps: int = 24) -> list[list[Slot]]:
    """Slots by column, from top to bottom: the order with fewest crossings that barycentre sweeps find."""
    slots: dict[Slot, int] = {**column, **{s: s.column for w in pieces for s in _passages(w)}}
    columns: list[list[Slot]] = [[] for _ in range(max(slots.values(), default=-1) + 1)]
    for slot, at in slots.items():
        columns[at].append(slot)
    best, fewest = [list(c) for c in columns], crossings(columns, pieces)
    for sweep in range(sweeps):
        _sweep(columns, pieces, forward=sweep % 2 == 0)
        found = crossings(columns, pieces)
        if found < fewest:
            best, fewest = [list(c) for c in columns], found
    return best


def _passages(wire: Wire) -> Iterable[Passage]:
    return (slot for slot in (wire.source, wire.target) if isinstance(slot, Passage))


def _sweep(columns: list[list[Slot]], pieces: Sequence[Wire], forward: bool) -> None:
    """Sort every column in place by the mean place of its slots' neighbours in the column before."""
    place = {slot: (i + 0.5) / len(c) for c in columns for i, slot in enumerate(c)}
    near: dict[Slot, list[Wire]] = {slot: [] for slot in place}
    for wire in pieces:
        near[wire.target if forward else wire.source].append(wire)
    for column in columns if forward else reversed(columns):
        for slot in column:
            if near[slot]:
                seen = [_start(w, place, column) if forward else place[w.target] for w in near[slot]]
                place[slot] = sum(seen) / len(seen)
        column.sort(key=place.__getitem__)
        place.update({slot: (i + 0.5) / len(column) for i, slot in enumerate(column)})


def _start(wire: Wire, place: Mapping[Slot, float], column: Sequence[Slot]) -> float:
    """Where a wire starts: a little above or below the middle of its slot, by its port."""
    return place[wire.source] + 0.5 * (wire.port - 0.5) / len(column)


def crossings(columns: Columns, pieces: Sequence[Wire]) -> int:
    """How many pairs of wires cross; those of one value, which start together, do not."""
    place = {slot: float(i) for column in columns for i, slot in enumerate(column)}
    gaps: dict[int, list[tuple[float, float]]] = {}
    at = {slot: i for i, column in enumerate(columns) for slot in column}
    for wire in pieces:
        start = place[wire.source] + 0.8 * (wire.port - 0.5)
        gaps.setdefault(at[wire.source], []).append((start, place[wire.target]))
    pairs = (pair for ends in gaps.values() for pair in combinations(ends, 2))
    return sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in pairs)
