"""Which parameters of a trained model stay as they are: the patterns of `freeze`, applied to its parameters.

A pattern is one of fnmatch, over the HF name of a parameter with or without ``model.`` before it: ``embed*``,
``layers.0.*``, ``*norm.weight``. What an engine keeps in one matrix can only be frozen as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from hflow.diagnostics import Diagnostic
from hflow.graph.infer.kinds.train import frozen_patterns
from hflow.graph.ir import Graph, Node
from hflow.plan.families.registry import FAMILIES
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import SCALAR_HEAD, Parameter, num_parameters, parameters

_PREFIX = "model."
# Modules whose weights engines that train keep in one matrix, and whose biases in one vector, as they do with
# those of all experts of a layer.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True)
class TrainedWith:
    """What the trainer of a model keeps otherwise than weights, gradients and moments of all parameters, and
    a frozen model otherwise than all its weights.

    `freeze`: patterns of the names of parameters that have weights only. `averages`: moving averages of the
    weights in float32, one for each model that takes them over. `on_base`: what an adapter leaves as it is
    lies with the trainer of another model, which has the same (`Model.base`). `sent`: copies of the weights
    as they were sent last, one for each node that gets changed ones alone (`ModelUse.delta_weights`).
    """

    freeze: tuple[str, ...] = ()
    averages: int = 0
    on_base: bool = False
    sent: int = 0


ALL_TRAINED = TrainedWith()


def trained_with(graph: Graph, model: str) -> TrainedWith:
    """Of the trainer of `model`; of one that no node trains only where its base lies."""
    trainers, on_base = graph.trainers(model), graph.model(model).base is not None
    if not trainers:
        return TrainedWith(on_base=True) if on_base else ALL_TRAINED
    users = (node.model for node in graph.nodes if node.model and node.model.model == model)
    sent = sum(use.delta_weights is not None for use in users)
    return TrainedWith(frozen_patterns(trainers[0]), len(averaging(graph, model)), on_base, sent)


def averaging(graph: Graph, model: str) -> tuple[str, ...]:
    """The models that take over a moving average of the weights of `model`."""
    return tuple(
        m.name for m in graph.models if m.refresh and m.refresh.is_average and m.refresh.model == model
    )


@lru_cache(maxsize=256)
def frozen_names(shape: ModelShape, freeze: tuple[str, ...]) -> frozenset[str]:
    """The parameters of a model that are not trained: those that match a pattern, and beside an adapter all
    but a scalar head."""
    if not freeze and not shape.adapter:  # as most models are
        return frozenset()
    if shape.adapter:
        return frozenset(p.name for p in parameters(shape.base) if p.name != SCALAR_HEAD)
    return frozenset(p.name for p in parameters(shape) if any(_matches(p.name, f) for f in freeze))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix(_PREFIX), pattern)


@lru_cache(maxsize=256)
def untrained_layers(shape: ModelShape, freeze: tuple[str, ...]) -> int:
    """How many layers, from the first on, have nothing that is trained in them or before them: they keep
    nothing for a backward pass, which never reaches them."""
    frozen = frozen_names(shape, freeze)
    trained = [p for p in parameters(shape) if p.name not in frozen]
    if any(p.ends[0] for p in trained):
        return 0
    return min((p.layer for p in trained if p.layer is not None), default=shape.num_layers)


@lru_cache(maxsize=256)
def moved_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """What a reader of a trained model takes over: all parameters, and beside an adapter those that are
    trained, since it has loaded the others itself."""
    return _trained(shape) if shape.adapter else parameters(shape)


def _trained(shape: ModelShape) -> tuple[Parameter, ...]:
    frozen = frozen_names(shape, ())
    return tuple(p for p in parameters(shape) if p.name not in frozen)


@lru_cache(maxsize=256)
def trained_share(shape: ModelShape, freeze: tuple[str, ...]) -> float:
    """What part of a model's parameters learns."""
    frozen = frozen_names(shape, freeze)
    held = sum(p.size for p in parameters(shape) if p.name in frozen)
    return 1 - held / num_parameters(shape)


def unusable_patterns(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF212 for every train node that cannot freeze what its patterns say."""
    for node in (n for n in graph.nodes if n.op == "train" and frozen_patterns(n)):
        problem, help_ = _problem(shapes[node.model_use.model], frozen_patterns(node), node)
        if problem:
            yield Diagnostic("HF212", problem, node.span, help_)


def unusable_adapters(graph: Graph, shapes: Mapping[str, ModelShape]) -> Iterator[Diagnostic]:
    """HF230 for every adapter of a model whose layers no adapter fits."""
    for model in (m for m in graph.models if m.adapter):
        shape = shapes[model.name]
        if kind := unadaptable(shape):
            message = f"`{model.name}` ({shape.family}) has {kind}, for which there are no adapters"
            yield Diagnostic("HF230", message, model.span, "drop `adapter`, or take another model")


def unadaptable(shape: ModelShape) -> str:
    """What of a model no adapter fits, empty for most: PEFT would adapt a projection that files have fused
    with others as one."""
    if shape.moe or shape.latent:
        return "experts" if shape.moe else "latent attention"
    return "fused projections" if FAMILIES[shape.family].fused else ""


def _problem(shape: ModelShape, freeze: tuple[str, ...], node: Node) -> tuple[str, str]:
    """A message and help; both empty where there is nothing to say."""
    model = node.model_use.model
    idle = next((pattern for pattern in freeze if not frozen_names(shape, (pattern,))), None)
    if idle is not None:
        names = [p.name for p in parameters(shape)]
        help_ = f"`*` stands for any text; parameters are called `{names[0]}`, `{names[1]}`, …"
        return f"`{node.name}` freezes `{idle}`, but `{model}` has no parameter of such a name", help_
    frozen = frozen_names(shape, freeze)
    if len(frozen) == len(parameters(shape)):
        return f"`{node.name}` freezes all of `{model}`, and so trains nothing", "freeze fewer parameters"
    for parameter in parameters(shape):
        together = _together(parameter)
        other = next((name for name in together if (name in frozen) != (parameter.name in frozen)), "")
        if other:
            help_ = "freeze all or none of " + ", ".join(together)
            return f"`{node.name}` splits `{parameter.name}` from `{other}`: they are one matrix", help_
    return "", ""


def _together(parameter: Parameter) -> tuple[str, ...]:
    """The parameters that are one with another, itself included; of a layer's experts the first one's, with
    which each of them is one."""
    name = parameter.name
    first = (name.replace(f".experts.{parameter.expert}.", ".experts.0."),) if parameter.expert else ()
    for modules in FUSED:
        own = next((m for m in modules if f".{m}." in name), None)
        if own:
            return (*(name.replace(f".{own}.", f".{module}.") for module in modules), *first)
    return (name, *first)
