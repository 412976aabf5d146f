"""What the graph inside a plan edited by hand may get wrong: what names nothing, and options of no use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hflow.graph.infer.kinds import call, data, generate, score, train
from hflow.graph.ir import Graph, Model, Node, Ref
from hflow.graph.options import Option

_WITH_MODEL = ("generate", "score", "train")
_WITH_FUNCTION = ("call", "train")
_REPEAT = (
    Option("rows", "int", above=0),
    Option("times", "int", above=0),
    Option("short", "str"),
    Option("max_age", "int", least=0),
)


def broken_graph(graph: Graph) -> Iterator[str]:
    """Where a graph that no graph file makes contradicts itself, in words."""
    if not graph.regions or not graph.nodes:
        yield "its graph has no nodes, or no step"
        return
    for kind, named in (("nodes", graph.nodes), ("models", graph.models), ("regions", graph.regions)):
        twice = [name for name, count in Counter(n.name for n in named).items() if count > 1]
        yield from (f"two {kind} are called `{name}`" for name in twice)
    models = {m.name for m in graph.models}
    for model in graph.models:
        if model.dtype == "auto":
            yield f"model `{model.name}` has no dtype"
        if model.refresh and model.refresh.model not in models:
            yield f"model `{model.name}` takes over the weights of `{model.refresh.model}`, which is no model"
        if model.base is not None and not _has_base(graph, model):
            yield f"model `{model.name}` cannot have its frozen weights from `{model.base}`"
    before: dict[str, Node] = {}
    for named in graph.evaluations:
        if len({n.name for n in named.nodes}) < len(named.nodes):
            yield f"two nodes of evaluation `{named.name}` have one name"
    for node in graph.nodes:
        yield from _broken_node(graph, node, models)
        yield from _broken_inputs(graph, node, before)
        before[node.name] = node
    ends = [(r.name, r.until) for r in graph.regions if r.until]
    for what, ref in (*ends, *([("eval", graph.evaluation.metric)] if graph.evaluation else [])):
        if not _has(graph, ref):
            yield f"`{what}` reads `{ref}`, which does not exist"


def _has_base(graph: Graph, model: Model) -> bool:
    """Whether the model that it names has the same frozen weights."""
    other = next((m for m in graph.models if m.name == model.base), None)
    if other is None or other.base is not None or not (model.adapter and other.adapter):
        return False
    alike = (model.path, model.dtype) == (other.path, other.dtype)
    return alike and (model.head, other.head) != ("lm", "scalar")


def _broken_node(graph: Graph, node: Node, models: set[str]) -> Iterator[str]:
    if node.region not in {r.name for r in graph.regions}:
        yield f"node `{node.name}` stands in `{node.region}`, which is no region"
    if (node.op in _WITH_MODEL) != (node.model is not None):
        yield f"node `{node.name}` ({node.op}) has {'no' if node.model is None else 'a'} model"
    if node.model and node.model.model not in models:
        yield f"node `{node.name}` uses `{node.model.model}`, which is no model"
    if (node.op in _WITH_FUNCTION) != (node.function is not None):
        yield f"node `{node.name}` ({node.op}) has {'no' if node.function is None else 'a'} function"
    if (node.op == "train") != (node.repeat is not None):
        yield f"node `{node.name}` ({node.op}) has {'no' if node.repeat is None else 'a'} repeat"
    if not node.inputs and not node.outputs:
        yield f"node `{node.name}` neither reads nor makes anything"
    if any(dim.size is None for port in (*node.inputs, *node.outputs) for dim in port.type.dims):
        yield f"node `{node.name}` has a dim of unknown size"
    yield from _bad_options(node)


def _bad_options(node: Node) -> Iterator[str]:
    """Options of a node's kind by kind and bounds; of its function, which may take anything, by name."""
    own = {option.name: option for option in _options(node)}
    of_function: Mapping[str, Any] = node.function.options if node.function else {}
    expected = {name for name, option in own.items() if not option.optional}
    for name in sorted({*expected, *of_function} - node.options.keys()):
        yield f"node `{node.name}` lacks the option `{name}`"
    for name, value in node.options.items():
        option = own.get(name)
        if option is None and name not in of_function:
            yield f"node `{node.name}` has no option `{name}`"
        if option and value != option.default and not option.accepts(value):
            yield f"option `{name}` of node `{node.name}` is not {option.expectation}"


def _options(node: Node) -> Sequence[Option]:
    match node.op:
        case "data":
            return data.OPTIONS
        case "generate":
            return generate.options({i.port for i in node.inputs})
        case "score":
            return score.OPTIONS
        case "train":
            return train.OPTIONS
        case "repeat":
            return _REPEAT
        case "call":
            return call.OPTIONS


def _broken_inputs(graph: Graph, node: Node, before: dict[str, Node]) -> Iterator[str]:
    for value in node.inputs:
        if not _has(graph, value.source):
            yield f"`{node.name}.{value.port}` reads `{value.source}`, which does not exist"
        elif not value.lag and value.source.node not in before:
            yield f"`{node.name}.{value.port}` reads `{value.source}`, which comes later"


def _has(graph: Graph, ref: Ref) -> bool:
    return any(n.name == ref.node and n.output(ref.port) for n in graph.nodes)
