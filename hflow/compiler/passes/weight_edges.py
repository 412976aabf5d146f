"""Derive the weight edges: who reads, or takes over, a model that some node trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hflow.compiler.state import Draft, WeightRead
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Model, Node


def weight_edges(draft: Draft) -> Draft:
    """Raises HF307 for a node that may read weights more than one update old (`lag`), HF226 for a model
    that takes over the weights of one with another shape."""
    problems = [*_not_scheduled(draft), *_unlike(draft)]
    if problems:
        raise HflowError(problems)
    readers = [n for n in draft.graph.nodes if n.model and n.op != "train"]
    return replace(draft, weight_edges=tuple(edge for n in readers for edge in _edges(draft, n)))


def _edges(draft: Draft, reader: Node) -> Iterator[WeightRead]:
    """The edge from the last training of the model that `reader` uses, or that its model takes over."""
    model = draft.graph.model_of(reader)
    every = model.refresh.every if model.refresh else 0
    trainers = draft.graph.trainers(model.refresh.model if model.refresh else model.name)
    for trainer in trainers[-1:]:
        yield WeightRead(model.name, trainer.name, reader.name, reader.model_use.lag, every)


def _not_scheduled(draft: Draft) -> Iterator[Diagnostic]:
    for node in draft.graph.nodes:
        if node.model and node.model.lag > 1:
            lag = node.model.lag
            message = f"`{node.name}` may read weights {lag} updates old (`lag`), which is not scheduled yet"
            yield Diagnostic("HF307", message, node.span, "`lag: 1` is; without `lag` weights are the newest")


def _unlike(draft: Draft) -> Iterator[Diagnostic]:
    models = {m.name: m for m in draft.graph.models}
    for model in models.values():
        source = models.get(model.refresh.model) if model.refresh else None
        if source and draft.shapes[model.name] != draft.shapes[source.name]:
            yield _another_shape(model, source)


def _another_shape(model: Model, source: Model) -> Diagnostic:
    message = f"`{model.name}` takes over the weights of `{source.name}`, but is of another shape"
    help_ = f"`{model.path}` and `{source.path}` must have equal config.json files, and the models one head"
    return Diagnostic("HF226", message, model.span, help_)
