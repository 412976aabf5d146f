"""The graphs that evaluate a graph: the nodes behind the metric, on held-out rows, greedily; those of each
named evaluation, as this says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hflow.graph.checks.checks import ancestors
from hflow.graph.ir import Graph, NamedEvaluation, Node
from hflow.graph.types import Factor, ValueType


def evaluation_graph(graph: Graph) -> Graph | None:
    """The ancestors of the metric with `rows` rows per data node and one greedy sample per prompt.

    Types stay as they were inferred, but for the sizes of these factors and the ages of weights: the newest
    are read, whatever the `lag` of a node. Nodes of a region run once. None when the graph has no evaluation.
    """
    if graph.evaluation is None:
        return None
    names = ancestors({n.name: n for n in graph.nodes}, graph.evaluation.metric.node)
    kept = [n for n in graph.nodes if n.name in names]
    rows, loop = graph.evaluation.rows, graph.regions[:1]
    factors = dict(pair for node in kept for pair in _resized(node, rows))
    nodes = tuple(_evaluated(node, factors, _options(node, rows), loop[0].name) for node in kept)
    return replace(graph, nodes=nodes, regions=loop, evaluation=None, evaluations=(), text="")


def named_graph(graph: Graph, evaluation: NamedEvaluation) -> Graph:
    """The graph of one of its named evaluations, whose nodes are typed when the file is read."""
    return replace(
        graph, nodes=evaluation.nodes, regions=graph.regions[:1], evaluation=None, evaluations=(), text=""
    )


def _resized(node: Node, rows: int) -> list[tuple[Factor, Factor]]:
    """The factor that a node adds to dims, and what it is in evaluation."""
    if node.op == "data":
        factor = node.outputs[0].type.dims[0].factors[0]
        return [(factor, replace(factor, size=rows))]
    if node.op == "generate" and "n" in node.options:
        factor = node.type_of("tokens").dims[0].factors[-1]
        return [(factor, replace(factor, size=1))]
    return []


def _options(node: Node, rows: int) -> Mapping[str, Any]:
    match node.op:
        case "data":
            return {**node.options, "batch": rows}
        case "generate":
            samples = {"n": 1} if "n" in node.options else {}
            return {**node.options, **samples, "temperature": 0.0}
        case _:
            return node.options


def _evaluated(node: Node, factors: Mapping[Factor, Factor], options: Mapping[str, Any], region: str) -> Node:
    return replace(
        node,
        model=replace(node.model, lag=0, delta_weights=None) if node.model else None,
        inputs=tuple(replace(i, type=_type(i.type, factors)) for i in node.inputs if node.op != "data"),
        outputs=tuple(replace(o, type=_type(o.type, factors)) for o in node.outputs),
        options=options,
        after=(),
        region=region,
        lengths=None,  # the step's, of other rows
    )


def _type(type_: ValueType, factors: Mapping[Factor, Factor]) -> ValueType:
    dims = tuple(replace(d, factors=tuple(factors.get(f, f) for f in d.factors)) for d in type_.dims)
    made_by = type_.provenance
    return replace(type_, dims=dims, provenance=replace(made_by, lag=0) if made_by else None)
