"""The textual IR of a graph: what was inferred, for people and for golden tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hflow.graph.adapter import AnyAdapter, StoredAdapter
from hflow.graph.ir import Graph, Input, Model, NamedEvaluation, Node
from hflow.graph.types import Factor


def ir(graph: Graph) -> str:
    """One block per node: its call, the nodes of its region, then a line per value with its inferred type."""
    lines = [f"graph {graph.name}({_arguments(graph.params)})"]
    lines += [f"  model {_model(m)}" for m in graph.models]
    loop = graph.regions[0]
    lines.append(f"  loop {loop.name} x {loop.times}")
    for node in graph.inside(loop.name):
        lines += [f"    {line}" for line in _node(graph, node)]
    if graph.evaluation:
        e = graph.evaluation
        lines.append(f"  eval %{e.metric} rows={e.rows} every={e.every}")
    for named in graph.evaluations:
        lines += [f"  {line}" for line in _evaluation(named)]
    lines += [f"  dim {line}" for line in _dims(graph)]
    return "\n".join(lines) + "\n"


def _model(model: Model) -> str:
    words = [model.name, "=", model.path, model.head, model.dtype, "frozen" if model.frozen else ""]
    if model.refresh:
        decay = f", decay={model.refresh.decay:g}" if model.refresh.decay else ""
        words.append(f"refresh({model.refresh.model}, every={model.refresh.every}{decay})")
    if model.adapter:
        words.append(f"adapter({', '.join(_adapter(model.adapter))})")
    if model.base:
        words.append(f"base({model.base})")
    return " ".join(filter(None, words))


def _adapter(adapter: AnyAdapter) -> Iterator[str]:
    if isinstance(adapter, StoredAdapter):
        yield adapter.path
    if adapter.rank is not None:
        yield f"rank={adapter.rank}"
    if adapter.alpha is not None:
        yield f"alpha={adapter.alpha:g}"
    if adapter.targets is not None:
        yield ",".join(adapter.targets)
    if adapter.dropout:
        yield f"dropout={adapter.dropout:g}"


def _node(graph: Graph, node: Node) -> Iterator[str]:
    yield f"{node.name} = {' '.join(_call(node))}"
    for inner in graph.inside(node.name) if node.op == "repeat" else ():
        yield from (f"  {line}" for line in _node(graph, inner))
    names = [f"%{node.name}.{o.port}" for o in node.outputs]
    width = max(map(len, names), default=0)
    for name, output in zip(names, node.outputs):
        yield f"  {name:<{width}} : {output.type}"


def _call(node: Node) -> Iterator[str]:
    yield node.op
    if node.model:
        yield f"{node.model.weights}@k" + (f"-{node.model.lag}" if node.model.lag else "")
    if node.model and node.model.delta_weights:
        yield f"delta_weights({node.model.delta_weights:g})"
    if node.function:
        yield node.function.reference
    if node.inputs:
        yield f"({', '.join(map(_input, node.inputs))})"
    if node.options:
        yield "{" + _arguments(node.options) + "}"
    if node.repeat:
        yield f"repeat(epochs={node.repeat.epochs}, minibatch={node.repeat.minibatch})"
    if node.lengths:
        yield f"lengths({node.lengths})"
    if node.after:
        yield f"after({', '.join(node.after)})"


def _input(value: Input) -> str:
    """`?` marks what the file did not write and inference wired; `@-1` a value of the step before."""
    init = f" init {value.init}" if value.type.scalar else ""
    carried = f"@-{value.lag}{init}" if value.lag else ""
    return f"{value.port}{'?' * value.derived}=%{value.source}{carried}"


def _evaluation(evaluation: NamedEvaluation) -> Iterator[str]:
    at = ",".join(evaluation.at) or "-"
    head = f"evaluation {evaluation.name} rows={evaluation.rows} every={evaluation.every} at={at}"
    for what, options in (("data", evaluation.data), ("sampling", evaluation.sampling)):
        head += f" {what}{{{_arguments(options)}}}" if options else ""
    yield head
    for metric in evaluation.metrics:
        more = f" {{{_arguments(metric.options)}}}" if metric.options else ""
        yield f"  {metric.name} = {metric.kind} %{metric.source}{more}"


def _dims(graph: Graph) -> Iterator[str]:
    """Every factor of the graph's types, once: its greatest or exact size and the node that made it."""
    factors: dict[Factor, bool] = {}
    for node in graph.nodes:
        for output in node.outputs:
            for dim in output.type.dims:
                factors.update(dict.fromkeys(dim.factors, dim.ragged))
    for factor, ragged in factors.items():
        yield f"{factor.name}{'~ <=' if ragged else ' ='} {factor.size} of {factor.origin}"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={json.dumps(v)}" for k, v in values.items() if v is not None)
