"""Rollouts that can never fit into the positions of their model, however short a prompt is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.diagnostics import Diagnostic
from hflow.graph.ir import Graph
from hflow.plan.model_shape import ModelShape


def too_few_positions(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF304 for every generate node whose new tokens leave no position for a prompt. How long prompts are in
    truth is known when the data are read, and checked there."""
    for node in (n for n in graph.nodes if n.op == "generate"):
        model = node.model_use.model
        new, have = node.options["max_new_tokens"], shapes[model].max_positions
        if new >= have:
            message = f"`{node.name}` samples up to {new} tokens after a prompt of 1 or more, and model"
            message += f" `{model}` has {have} positions"
            help_ = "a smaller `max_new_tokens`, or a model with more `max_position_embeddings`"
            yield Diagnostic("HF304", message, node.span, help_)
