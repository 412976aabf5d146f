"""Train nodes whose balancing loss has no experts to balance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.diagnostics import Diagnostic
from hflow.graph.infer.kinds.train import balance_coef
from hflow.graph.ir import Graph
from hflow.plan.model_shape import ModelShape


def idle_balancing(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF212 for every train node with `balance_coef` of a model without experts."""
    for node in (n for n in graph.nodes if n.op == "train" and balance_coef(n)):
        model = node.model_use.model
        if shapes[model].moe is None:
            message = f"`{node.name}` has `balance_coef`, but `{model}` has no experts to balance"
            yield Diagnostic("HF212", message, node.span, "leave the option out")
