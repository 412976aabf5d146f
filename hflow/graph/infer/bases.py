"""Frozen models that are the base of a model with an adapter: their weights are held once.

An adapter leaves a model's own matrices as they are. A frozen reference model that begins in the same folder
has the same ones, so whoever scores with it uses the trained model without its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.graph.source.schema import (
    GraphSpec,
    InnerNodeSpec,
    ModelSpec,
    RepeatNodeSpec,
    ScoreSpec,
    TrainSpec,
)


def shared_bases(spec: GraphSpec) -> Mapping[str, str]:
    """Of every frozen model that only score nodes use the trained model whose base it is."""
    nodes = tuple(_nodes(spec))
    trained = {node.model for node in nodes if isinstance(node, TrainSpec)}
    adapted = {name: m for name, m in spec.models.items() if m.adapter and name in trained}
    others = {name for node in nodes for name in _used_otherwise(node)}
    found: dict[str, str] = {}
    for name, model in spec.models.items():
        base_of = next((of for of, own in adapted.items() if _kind(own) == _kind(model)), None)
        if base_of and model.frozen and not model.adapter and not model.refresh and name not in others:
            found[name] = base_of
    return found


def _nodes(spec: GraphSpec) -> Iterator[InnerNodeSpec]:
    for node in spec.nodes.values():
        if isinstance(node, RepeatNodeSpec):
            yield from node.nodes.values()
        else:
            yield node


def _used_otherwise(node: InnerNodeSpec) -> Iterator[str]:
    """The models that a node names for anything but scoring."""
    if "tokenizer" in node.with_:
        yield str(node.with_["tokenizer"])
    if isinstance(node, TrainSpec):
        yield node.model
    elif not isinstance(node, ScoreSpec) and (use := getattr(node, "model", None)):
        yield use.use


def _kind(model: ModelSpec) -> tuple[str, str, str]:
    return model.path, model.head, model.dtype
