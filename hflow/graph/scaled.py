"""A graph with other amounts of work: shorter or longer responses, smaller or larger batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from hflow.graph.ir import Graph
from hflow.graph.load import load_text
from hflow.graph.write.yaml_printer import YamlTree, layout, tree


def with_responses(graph: Graph, factor: float) -> Graph:
    """All responses are `factor` times as long: the most tokens that generate nodes may make, rounded up, and
    what is stated of their lengths. Options of functions stay as they are.

    Raises:
        HflowError: as `hflow.graph.load.load_text`, for a graph that cannot be so.
    """
    written = tree(graph)
    for node in (node for node in _nodes(written["nodes"]) if node["op"] == "generate"):
        node["with"]["max_new_tokens"] = ceil(node["with"]["max_new_tokens"] * factor)
        if "lengths" in node:
            node["lengths"] = {name: tokens * factor for name, tokens in node["lengths"].items()}
    return load_text(layout(written))


def with_batch(graph: Graph, factor: int) -> Graph:
    """A step has `factor` times the rows: data nodes draw so many more, and regions collect them. A minibatch
    stays as large as it is, unless it was all rows: then it is all of them again. Raises as
    `with_responses`."""
    written = tree(graph)
    for node in _nodes(written["nodes"]):
        if node["op"] == "data":
            node["with"]["batch"] *= factor
        if node["op"] == "repeat":
            node["until"]["rows"] *= factor
    return load_text(layout(written))


def _nodes(nodes: Mapping[str, Any]) -> Iterator[YamlTree]:
    """Those of regions, too."""
    for node in nodes.values():
        yield node
        yield from _nodes(node.get("nodes", {}))
