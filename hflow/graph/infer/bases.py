"""Frozen models that are the base of a model with an adapter: their weights are held once.

An adapter leaves a model's own matrices as they are. A frozen reference model that begins in the same folder
has the same ones, so whoever scores with it uses the trained model without its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.graph.ir import ModelDType
from hflow.graph.source.schema import (
    GraphSpec,
    InnerNodeSpec,
    RepeatNodeSpec,
    ScoreSpec,
    TrainSpec,
)


def shared_bases(spec: GraphSpec) -> Mapping[str, str]:
    """Of every frozen model that only score nodes use the trained model whose base it is."""
    return _sharing(spec)[0]


def settled_dtypes(spec: GraphSpec) -> Mapping[str, ModelDType]:
    """Of every model the dtype that was said of it, or of one that shares its frozen weights."""
    shared, said = _sharing(spec)
    return {name: said.get(_owner(shared.get(name, name), spec), "auto") for name in spec.models}


def _sharing(spec: GraphSpec) -> tuple[Mapping[str, str], Mapping[str, ModelDType]]:
    """The shared bases; and the dtypes that were said, by the model that owns the weights."""
    said: dict[str, ModelDType] = {}
    for name, model in spec.models.items():
        if model.dtype != "auto":
            said.setdefault(_owner(name, spec), model.dtype)
    nodes = tuple(_nodes(spec))
    trained = {node.model for node in nodes if isinstance(node, TrainSpec)}
    adapted = {name: m for name, m in spec.models.items() if m.adapter and name in trained}
    others = {name for node in nodes for name in _used_otherwise(node)}
    found: dict[str, str] = {}
    for name, model in spec.models.items():
        if not model.frozen or model.adapter or model.refresh or name in others:
            continue
        for of, own in adapted.items():
            dtype = said.get(_owner(of, spec), model.dtype)
            if (own.path, own.head) == (model.path, model.head) and model.dtype in (dtype, "auto"):
                found[name] = of
                said |= {_owner(of, spec): dtype} if dtype != "auto" else {}
                break
    return found, said


def _owner(name: str, spec: GraphSpec) -> str:
    """The model whose frozen weights a model has."""
    return spec.models[name].base or name


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
