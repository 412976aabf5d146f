"""A graph with the lengths that a run saw, in the place of those that it states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hflow.graph.ir import Graph, Node
from hflow.graph.lengths_file import SeenLengths

# The option of a node that says how long its texts are at most, by kind of node.
GREATEST = {"data": "max_prompt_tokens", "generate": "max_new_tokens"}


def with_lengths(graph: Graph, seen: Mapping[str, SeenLengths]) -> Graph:
    """Of the nodes that a run had under the same names; the others keep what is stated. Texts are cut off at
    what the graph admits."""
    return replace(graph, nodes=tuple(_seen(node, seen) for node in graph.nodes))


def _seen(node: Node, seen: Mapping[str, SeenLengths]) -> Node:
    if node.name not in seen or node.op not in GREATEST:
        return node
    return replace(node, lengths=seen[node.name].lengths.cut(node.options[GREATEST[node.op]]))
