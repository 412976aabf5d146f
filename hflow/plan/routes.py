"""The experts that a sampler's routers chose, and that other nodes follow.

A token has as many as the model makes choices, which its folder tells and no graph file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hflow.diagnostics import Diagnostic
from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.infer.regions import maker
from hflow.graph.ir import Graph, Node
from hflow.graph.types import CHOICE, Dim, ValueType
from hflow.plan.model_shape import ModelShape


def choices(shape: ModelShape) -> int:
    """Experts that a token passes through, over all layers."""
    return shape.expert_layers * shape.moe.top_k if shape.moe else 0


def unusable_routes(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF212 for routes of a model without experts, HF311 for those of one whose routers choose otherwise than
    the reader's."""
    evaluated = (node for evaluation in graph.evaluations for node in evaluation.nodes)
    for node in (*graph.nodes, *evaluated):
        made, read = node.output(ROUTES), node.input(ROUTES)
        if node.op == "generate" and made and shapes[node.model_use.model].moe is None:
            message = f"`{node.name}.{ROUTES}` is read, but `{node.model_use.model}` has no experts to choose"
            yield Diagnostic("HF212", message, node.span, f"drop `{ROUTES}` where it is read")
        made_by = read.type.provenance if read else None
        if node.op not in ("score", "train") or read is None or made_by is None:
            continue
        mine, theirs = node.model_use.model, made_by.model
        if shapes[theirs].moe and _choice(shapes[mine]) != _choice(shapes[theirs]):
            message = (
                f"`{node.name}` follows the routes of `{theirs}`, {_text(shapes[theirs])}, "
                f"with `{mine}`, {_text(shapes[mine])}"
            )
            help_ = f"drop `{ROUTES}` in `{node.name}`, whose own routers then choose"
            yield Diagnostic("HF311", message, node.span, help_)


def with_choices(graph: Graph, shapes: Mapping[str, ModelShape]) -> Graph:
    """`graph`, in which the types of routes say how many choices a token has. Every model that makes routes
    has experts."""
    makers = {
        node.name: shapes[node.model.model] for node in graph.nodes if node.op == "generate" and node.model
    }
    for node in (node for evaluation in graph.evaluations for node in evaluation.nodes):
        if node.op == "generate" and node.model:
            makers[node.name] = shapes[node.model.model]
    nodes = tuple(_sized(node, makers) for node in graph.nodes)
    evaluations = tuple(
        replace(each, nodes=tuple(_sized(node, makers) for node in each.nodes)) for each in graph.evaluations
    )
    is_same = nodes == graph.nodes and evaluations == graph.evaluations
    return graph if is_same else replace(graph, nodes=nodes, evaluations=evaluations)


def _sized(node: Node, makers: Mapping[str, ModelShape]) -> Node:
    ports = (*node.inputs, *node.outputs)
    if not any(_is_choice(dim) for port in ports for dim in port.type.dims):
        return node
    inputs = tuple(replace(port, type=_sized_type(port.type, makers)) for port in node.inputs)
    outputs = tuple(replace(port, type=_sized_type(port.type, makers)) for port in node.outputs)
    return replace(node, inputs=inputs, outputs=outputs)


def _sized_type(type_: ValueType, makers: Mapping[str, ModelShape]) -> ValueType:
    dims = tuple(_sized_dim(dim, makers) if _is_choice(dim) else dim for dim in type_.dims)
    return replace(type_, dims=dims)


def _sized_dim(dim: Dim, makers: Mapping[str, ModelShape]) -> Dim:
    (factor,) = dim.factors
    shape = makers[maker(str(factor.origin))]
    return replace(dim, factors=(replace(factor, size=choices(shape)),))


def _is_choice(dim: Dim) -> bool:
    """Whether its size is that of the routes of a model."""
    return [factor.name for factor in dim.factors] == [CHOICE] and dim.factors[0].origin is not None


def _choice(shape: ModelShape) -> tuple[int, int, int] | None:
    """Layers with experts, experts of each, and how many of these a token passes through."""
    return (shape.expert_layers, shape.moe.num_experts, shape.moe.top_k) if shape.moe else None


def _text(shape: ModelShape) -> str:
    found = _choice(shape)
    return "{} layers of {} experts, {} chosen".format(*found) if found else "without experts"
