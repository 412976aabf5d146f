"""The graph that evaluates a graph: the nodes behind the metric, on held-out rows, greedily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hflow.graph.checks.checks import ancestors
from hflow.graph.infer import kinds
from hflow.graph.infer.draft import CarriedInput, NodeDraft
from hflow.graph.infer.infer import infer
from hflow.graph.infer.kinds import generate
from hflow.graph.infer.signature import parse_signature
from hflow.graph.ir import Graph, ModelUse, Node
from hflow.graph.source.problems import Problems


def evaluation_graph(graph: Graph) -> Graph | None:
    """The ancestors of the metric with `rows` rows per data node and one greedy sample per prompt.

    Types are inferred again, so sizes are those of evaluation. The newest weights are read, whatever
    the `lag` of a node, and nodes of a region run once. None when the graph has no evaluation.
    """
    if graph.evaluation is None:
        return None
    by_name = {n.name: n for n in graph.nodes}
    kept = ancestors(by_name, graph.evaluation.metric.node)
    rows = graph.evaluation.rows
    drafts = {n.name: _draft(graph, n, _options(n, rows)) for n in graph.nodes if n.name in kept}
    problems = Problems()
    nodes = infer(drafts, list(drafts), problems)
    assert not problems.found and len(nodes) == len(drafts), problems.found
    loop = graph.regions[:1]
    return replace(graph, nodes=tuple(nodes.values()), regions=loop, evaluation=None, text="")


def _options(node: Node, rows: int) -> Mapping[str, Any]:
    match node.op:
        case "data":
            return {**node.options, "batch": rows}
        case "generate":
            samples = {"n": 1} if "n" in node.options else {}
            return {**node.options, **samples, "temperature": 0.0}
        case _:
            return node.options


def _draft(graph: Graph, node: Node, options: Mapping[str, Any]) -> NodeDraft:
    """A typed node as the draft that it was inferred from, with other options."""
    signature = parse_signature(node.function.signature) if node.function else None
    declared = {o.port: o.type for o in node.outputs} if node.op == "data" else {}
    written = {i.port for i in node.inputs if not i.derived}
    inputs = generate.inputs(written) if node.op == "generate" else kinds.input_ports(node.op, signature)
    return NodeDraft(
        node.name,
        node.op,
        inputs,
        tuple(o.port for o in node.outputs),
        {i.port: i.source for i in node.inputs if not i.derived},
        ModelUse(node.model.model) if node.model else None,
        head=graph.model(node.model.model).head if node.model else None,
        function=node.function,
        signature=signature,
        options=options,
        declared=declared,
        carried={i.port: CarriedInput(i.lag, i.init) for i in node.inputs if i.lag},
        region=graph.regions[0].name,
        span=node.span,
        input_spans={i.port: i.span for i in node.inputs if i.span},
    )
