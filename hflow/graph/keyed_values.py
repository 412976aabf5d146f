"""A graph as a flat table: every value under the path at which people know it from graph files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from hflow.graph.ir import Function, Graph, Input, Model, NamedEvaluation, Node, Refresh, Region

Pair = tuple[str, Any]

PRESENT = "present"  # the value of a key that only says that there are keys below it
KEEP = "keep"
_DRAWING = ("data", "generate")
_REGION = {"until": "until.keep", "rows": "until.rows", "max_age": "until.max_age"}  # as files call them


def keyed_values(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Of every key its values: ``nodes.actor_train.with.lr``, ``models.ref.refresh.every``. They are several
    where a graph says a thing twice: a region and its node do. Nodes of a region stand beside all others.

    Left out are `params`, whose values stand where they are used, and what equality of graphs leaves out.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for key, value in _pairs(graph):
        found[key] = (*found.get(key, ()), value)
    return found


def _pairs(graph: Graph) -> Iterator[Pair]:
    loop, *regions = graph.regions
    yield from _fields("", graph, "params", "models", "nodes", "regions", "evaluation", "evaluations")
    yield from _fields("loop.", loop)
    if graph.evaluation:
        yield "eval", PRESENT
        yield from _fields("eval.", graph.evaluation)
    for evaluation in graph.evaluations:
        yield from _evaluation(f"evaluations.{evaluation.name}", evaluation)
    for model in graph.models:
        yield from _model(f"models.{model.name}", model)
    for node in graph.nodes:
        yield from _node(f"nodes.{node.name}", node)
        yield f"nodes.{node.name}.region", _loop_of(node.region, graph)
    yield from _places(graph)
    for region in regions:
        yield from _region(f"nodes.{region.name}", region, graph)


def _fields(prefix: str, value: Any, *left_out: str) -> Iterator[Pair]:
    """The fields that count for equality, as a dataclass calls them."""
    for field in fields(value):
        if field.compare and field.name not in left_out:
            yield f"{prefix}{field.name}", getattr(value, field.name)


def _evaluation(key: str, evaluation: NamedEvaluation) -> Iterator[Pair]:
    """Without its nodes, which follow from those of the step."""
    yield key, PRESENT
    yield from _fields(f"{key}.", evaluation, "name", "metrics", "nodes", "data", "sampling")
    yield from _option(f"{key}.data", evaluation.data)
    yield from _option(f"{key}.sampling", evaluation.sampling)
    for metric in evaluation.metrics:
        place = f"{key}.metrics.{metric.name}"
        yield place, PRESENT
        yield f"{place}.{metric.kind}", metric.source
        for name, value in metric.options.items():
            yield f"{place}.{name}", value


def _model(key: str, model: Model) -> Iterator[Pair]:
    yield key, PRESENT
    yield from _fields(f"{key}.", model, "name", "refresh", "adapter")
    if model.refresh:
        yield from _refresh(f"{key}.refresh", model.refresh)
    if model.adapter:
        yield f"{key}.adapter", PRESENT
        yield from _fields(f"{key}.adapter.", model.adapter)


def _refresh(key: str, refresh: Refresh) -> Iterator[Pair]:
    yield key, PRESENT
    yield f"{key}.from", refresh.model
    yield from _fields(f"{key}.", refresh, "model")


def _node(key: str, node: Node) -> Iterator[Pair]:
    special = ("name", "op", "model", "function", "inputs", "outputs", "options", "repeat", "after", "region")
    yield key, node.op
    yield from _fields(f"{key}.", node, *special)
    if node.model:
        yield f"{key}.model", node.model.model
        yield from _fields(f"{key}.model.", node.model, "model")
    if node.function:
        yield from _function(f"{key}.{'loss' if node.op == 'train' else 'fn'}", node.function)
    for value in node.inputs:
        yield from _input(_input_key(key, node, value), value)
    for output in node.outputs:
        port = f"{key}.out.{output.port}"
        yield (f"{port}.type" if node.op == "repeat" else port), output.type
        yield from _fields(f"{port}.", output, "port", "type")
    for name, value in node.options.items():
        yield from _option(_option_key(key, node, name), value)
    if node.repeat:
        yield f"{key}.repeat", PRESENT
        yield from _fields(f"{key}.repeat.", node.repeat)
    yield f"{key}.after", tuple(sorted(node.after))


def _function(key: str, function: Function) -> Iterator[Pair]:
    yield key, function.reference
    yield from _fields(f"{key}.", function, "reference")


def _input(key: str, value: Input) -> Iterator[Pair]:
    yield key, value.source
    yield from _fields(f"{key}.", value, "port", "source")


def _input_key(key: str, node: Node, value: Input) -> str:
    """What a region reads of its own nodes stands under `until` and `out`."""
    if node.op != "repeat":
        return f"{key}.in.{value.port}"
    return f"{key}.until.{KEEP}" if value.port == KEEP else f"{key}.out.{value.port}"


def _option_key(key: str, node: Node, name: str) -> str:
    return f"{key}.{_REGION.get(name, name)}" if node.op == "repeat" else f"{key}.with.{name}"


def _option(key: str, value: Any) -> Iterator[Pair]:
    """An option, or each entry of one that is a mapping."""
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    yield key, PRESENT
    for name, inner in cast("Mapping[Any, Any]", value).items():
        yield from _option(f"{key}.{name}", inner)


def _region(key: str, region: Region, graph: Graph) -> Iterator[Pair]:
    yield f"{key}.region", _loop_of(region.parent, graph)
    for name, value in _fields("", region, "name", "parent"):
        yield f"{key}.{_REGION.get(name, name)}", value


def _loop_of(region: str | None, graph: Graph) -> str | None:
    """A name for the step loop that does not depend on what the file calls it."""
    return "step loop" if region == graph.regions[0].name else region


def _places(graph: Graph) -> Iterator[Pair]:
    """A node that draws has the random numbers of its place among the nodes of its kind."""
    for op in _DRAWING:
        for number, node in enumerate((n for n in graph.nodes if n.op == op), 1):
            yield f"nodes.{node.name}.place", f"{op} node {number}"
