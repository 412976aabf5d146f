"""Which random numbers the nodes of a graph draw: each has a stream of its own."""

from __future__ import annotations

from zlib import crc32

from hflow.graph.ir import Graph

_NAMED = 2**32  # streams of named evaluations begin here


def streams(graph: Graph) -> dict[str, int]:
    """Every node that draws, by its number among the graph's nodes of its kind; one of a named evaluation by
    a number that depends on the two names alone: an evaluation samples the same whichever others there
    are."""
    drawing = {op: [n.name for n in graph.nodes if n.op == op] for op in ("data", "generate")}
    numbers = {name: number for names in drawing.values() for number, name in enumerate(names)}
    named = (n.name for evaluation in graph.evaluations for n in evaluation.nodes)
    return numbers | {name: _NAMED + crc32(name.encode()) for name in named}
