"""A typed graph as a graph file, in canonical form.

``load_text(to_yaml(graph)) == graph``: what a graph says is written, what its file need not say (defaults,
derived masks, a minibatch of all rows) is left out. Expressions are not in a graph: their values are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from hflow.graph.adapter import ADAPTER_TARGETS, AnyAdapter, StoredAdapter
from hflow.graph.checks.evaluations import THRESHOLD
from hflow.graph.infer.kinds import call, data, generate, score, train
from hflow.graph.infer.regions import maker
from hflow.graph.ir import EvaluationMetric, Graph, Input, Model, ModelUse, NamedEvaluation, Node, Refresh
from hflow.graph.options import REQUIRED, Option
from hflow.graph.source.yaml_text import WIDTH, flow, key, scalar
from hflow.graph.types import ValueType

YamlTree = dict[str, Any]


def to_yaml(graph: Graph) -> str:
    """The graph file of a graph. Functions in files are named relative to where hflow runs."""
    return layout(tree(graph))


def tree(graph: Graph) -> YamlTree:
    """The graph file of a graph as dicts, lists and scalars."""
    loop = graph.regions[0]
    evaluation = graph.evaluation
    sections = {
        "hflow": 1,
        "name": graph.name,
        "doc": graph.doc,
        "params": dict(graph.params),
        "seed": graph.seed,
        "models": {m.name: _model(m) for m in graph.models},
        "loop": {"name": loop.name, "times": loop.times},
        "eval": _known(metric=str(evaluation.metric), rows=evaluation.rows, every=evaluation.every)
        if evaluation
        else None,
        "evaluations": {e.name: _evaluation(e) for e in graph.evaluations},
        "nodes": {n.name: _node(graph, n) for n in graph.inside(loop.name)},
    }
    return {name: section for name, section in sections.items() if section}


def layout(plain: Mapping[str, Any]) -> str:
    """The text of a graph file given as dicts, lists and scalars, in the form that ``hflow fmt`` keeps."""
    lines: list[str] = []
    after_mapping = False
    for name, section in plain.items():
        is_mapping = isinstance(section, Mapping)
        if lines and (is_mapping or after_mapping):
            lines.append("")
        lines += _section(name, section)
        after_mapping = is_mapping
    return "\n".join(lines) + "\n"


def _section(name: str, section: Any) -> Iterator[str]:
    if (
        name not in ("params", "models", "evaluations", "nodes")
        or not isinstance(section, Mapping)
        or not section
    ):
        yield from _entry(name, section, 0)
        return
    yield f"{name}:"
    if name == "nodes":
        yield from _nodes(cast("YamlTree", section), 1)
    else:
        yield from _block(cast("YamlTree", section), 1)


def _nodes(nodes: Mapping[str, Any], depth: int) -> Iterator[str]:
    for number, (name, node) in enumerate(nodes.items()):
        if number:
            yield ""
        yield f"{'  ' * depth}{key(name)}:"
        for part, value in node.items():
            if part == "nodes":
                yield f"{'  ' * (depth + 1)}nodes:"
                yield from _nodes(value, depth + 2)
            else:
                yield from _entry(part, value, depth + 1)


def _block(entries: Mapping[str, Any], depth: int) -> Iterator[str]:
    for name, value in entries.items():
        yield from _entry(name, value, depth)


def _entry(name: str, value: Any, depth: int) -> Iterator[str]:
    """One key: on one line if it fits, else as a block."""
    head = f"{'  ' * depth}{key(name)}:"
    nested = isinstance(value, (Mapping, Sequence)) and not isinstance(value, str)
    line = f"{head} {flow(value) if nested else scalar(value, in_flow=False)}"  # pyright: ignore[reportUnknownArgumentType]
    if not nested or not value or len(line) <= WIDTH:
        yield line
    elif isinstance(value, Mapping):
        yield head
        yield from _block(cast("YamlTree", value), depth + 1)
    else:
        yield head
        yield from (f"{'  ' * (depth + 1)}- {flow(item)}" for item in cast("Sequence[Any]", value))


def _known(**entries: Any) -> YamlTree:
    """The entries that say something: not None, not zero, not empty."""
    return {name: value for name, value in entries.items() if value}


def _model(model: Model) -> YamlTree:
    head = model.head if model.head != "lm" else None
    dtype = model.dtype if model.dtype != "auto" else None
    refresh = _refresh(model.refresh) if model.refresh else None
    adapter = _adapter(model.adapter) if model.adapter else None
    said = _known(head=head, frozen=model.frozen, dtype=dtype, refresh=refresh, adapter=adapter)
    said |= _known(base=model.base)
    return {"path": model.path, **said}


def _adapter(adapter: AnyAdapter) -> YamlTree:
    if isinstance(adapter, StoredAdapter):
        again = [*adapter.targets] if adapter.targets else None
        said = _known(rank=adapter.rank, alpha=adapter.alpha, targets=again, dropout=adapter.dropout)
        return {"path": adapter.path, **said}
    targets = list(adapter.targets) if adapter.targets != ADAPTER_TARGETS else None
    known = _known(targets=targets, dropout=adapter.dropout)
    return {"rank": adapter.rank, "alpha": adapter.alpha, **known}


def _refresh(refresh: Refresh) -> YamlTree:
    return {"from": refresh.model, "every": refresh.every, **_known(decay=refresh.decay)}


def _node(graph: Graph, node: Node) -> YamlTree:
    match node.op:
        case "data":
            written = _options(graph, node, data.OPTIONS)
            out = {o.port: _column(o.type) for o in node.outputs}
            said = _known(after=list(node.after), lengths=_lengths(node))
            return {"op": "data", **said, "with": written, "out": out}
        case "repeat":
            return _region(graph, node)
        case _:
            return _call(graph, node)


def _call(graph: Graph, node: Node) -> YamlTree:
    function = {"loss" if node.op == "train" else "fn": node.function.reference} if node.function else {}
    return {
        "op": node.op,
        **_known(model=_use(node.model) if node.model else None),
        **function,
        **_known(
            **{"in": {i.port: _source(i) for i in node.inputs if not i.derived}},
            after=list(node.after),
            lengths=_lengths(node),
            **{"with": _options(graph, node, _known_options(node))},
            repeat=_repeat(node),
        ),
    }


def _lengths(node: Node) -> YamlTree:
    return {"mean": node.lengths.mean, **dict(node.lengths.quantiles)} if node.lengths else {}


def _region(graph: Graph, node: Node) -> YamlTree:
    keep, *handed_out = node.inputs
    return {
        "op": "repeat",
        **_known(after=list(node.after)),
        "nodes": {n.name: _node(graph, n) for n in graph.inside(node.name)},
        "until": {
            "rows": node.options["rows"],
            "keep": str(keep.source),
            **_known(max_age=node.options["max_age"] or None),
        },
        "times": node.options["times"],
        **_known(short=node.options["short"] if node.options["short"] != "fail" else None),
        "out": {i.port: str(i.source) for i in handed_out},
    }


def _evaluation(evaluation: NamedEvaluation) -> YamlTree:
    at = list(evaluation.at)
    return {
        "rows": evaluation.rows,
        **_known(data=dict(evaluation.data), sampling=dict(evaluation.sampling)),
        "metrics": {metric.name: _metric(metric) for metric in evaluation.metrics},
        **_known(every=evaluation.every),
        **({"at": at} if at != ["start", "end"] else {}),
    }


def _metric(metric: EvaluationMetric) -> str | YamlTree:
    if metric.kind == "mean":
        return metric.source
    defaults = {"k": 1 if metric.kind == "pass" else None, "threshold": THRESHOLD}
    said = {name: value for name, value in metric.options.items() if value != defaults.get(name)}
    return {metric.kind: metric.source, **said}


def _use(use: ModelUse) -> str | YamlTree:
    said = _known(lag=use.lag, base=use.base, delta_weights=use.delta_weights)
    return {"use": use.model, **said} if said else use.model


def _source(value: Input) -> str | YamlTree:
    if not value.lag:
        return str(value.source)
    return {"from": str(value.source), "lag": value.lag, "init": value.init}


def _repeat(node: Node) -> YamlTree:
    if node.repeat is None:
        return {}
    epochs, minibatch = node.repeat.epochs, node.repeat.minibatch
    return _known(epochs=epochs if epochs != 1 else 0, minibatch=minibatch if minibatch != node.rows else 0)


def _column(type_: ValueType) -> str:
    """A column's type with all of its factors, those of size 1 too."""
    dims = ("*".join(f.name for f in dim.factors) + "~" * dim.ragged for dim in type_.dims)
    return f"{type_.dtype}[{', '.join(dims)}]"


def _known_options(node: Node) -> tuple[Option, ...]:
    """The options of the node's op; those of its function are in `Function.options`."""
    match node.op:
        case "generate":
            return generate.options({i.port for i in node.inputs if not i.derived})
        case "score":
            return score.OPTIONS
        case "train":
            return train.OPTIONS
        case "call":
            return call.OPTIONS
        case _:
            return ()


def _options(graph: Graph, node: Node, options: Sequence[Option]) -> YamlTree:
    """What `with:` has to say: the values that are no defaults."""
    defaults = {o.name: o.default for o in options if o.default is not REQUIRED}
    defaults |= dict(node.function.options) if node.function else {}
    if node.op == "data" and len({m.path for m in graph.models}) == 1:  # then any model's tokenizer will do
        defaults["tokenizer"] = graph.models[0].name
    if "temperature" in defaults:
        defaults["temperature"] = _inherited_temperature(graph, node, defaults["temperature"])
    required = {o.name for o in options if o.default is REQUIRED}
    return {
        name: value
        for name, value in node.options.items()
        if name in required or value != defaults.get(name, REQUIRED)
    }


def _inherited_temperature(graph: Graph, node: Node, default: float) -> float:
    """What the node has where its file says nothing (`hflow.graph.infer.inherited`)."""
    tokens = node.input("tokens") if node.model and graph.model_of(node).head == "lm" else None
    origin = tokens.type.dims[-1].factors[0].origin if tokens else None
    sampler = graph.node(maker(origin)) if origin else None
    if sampler is None or sampler.op != "generate":
        return default
    return sampler.options["temperature"] or (0.0 if node.op == "generate" else default)
