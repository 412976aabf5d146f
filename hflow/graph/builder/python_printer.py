"""A graph file as Python that builds the same graph with `hflow.GraphBuilder`."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, cast

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.builder.builder import GraphBuilder
from hflow.graph.builder.python_text import Arguments, Code, call, literal
from hflow.graph.source.document import Document
from hflow.graph.source.expressions import substitute

INDENT = "    "
TAKEN = ("g", "graph", "hflow")  # names that the program itself has
NAMING = ("in", "after", "model", "fn", "loss")  # keys of a node that name others
METHODS = ("until", "out")  # of a region, and no outputs
Spec = Mapping[str, Any]


def to_python(document: Document) -> str:
    """The program, of an assembled document (`hflow.graph.load.assembled`) that is a right graph. Expressions
    stay as they were written, but for those that name nodes and models. The section ``run`` is no part of a
    graph, and left out.

    Raises:
        HflowError: HF106 for an input or an option that is called as a keyword of the builder.
    """
    written, values = (cast(Spec, each.root.plain()) for each in (document, substitute(document)[0]))
    if clashes := tuple(_clashes(document, written["nodes"])):
        raise HflowError(clashes)
    nodes = {name: _named(spec, values["nodes"][name]) for name, spec in written["nodes"].items()}
    return "\n".join(_Program({**written, "nodes": nodes}).lines()) + "\n"


def _named(written: Spec, values: Spec) -> Spec:
    """A node as it was written, but for what names others."""
    node = {**written, **{key: values[key] for key in NAMING if key in written}}
    inner: Spec = written.get("nodes", {})
    return {**node, "nodes": {name: _named(spec, values["nodes"][name]) for name, spec in inner.items()}}


def _clashes(document: Document, nodes: Spec) -> Iterator[Diagnostic]:
    for name, spec in nodes.items():
        yield from _clashes(document, spec.get("nodes", {}))
        if spec["op"] == "repeat":
            continue
        parameters = signature(getattr(GraphBuilder, spec["op"])).parameters.values()
        keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} - {"timeout_s"}
        for given in sorted(keywords & {*spec.get("in", {}), *spec.get("with", {})}):
            message = f"`{given}` of `{name}` cannot be said in Python: it is a keyword of the builder"
            yield Diagnostic("HF106", message, document.root.span)


class _Program:
    """`models`, `nodes`: those that have a variable by now, and which; `mentioned`: those that need one."""

    def __init__(self, file: Spec):
        self.file = file
        self.models: dict[str, str] = {}
        self.nodes: dict[str, str] = {}
        self.mentioned = set(_mentioned(file))

    def lines(self) -> Iterator[str]:
        yield from ("import hflow", "")
        yield from call("g = hflow.GraphBuilder", self._head())
        for name, spec in self.file.get("models", {}).items():
            yield from self._made(name, "model", self._model(spec), self.models)
        yield ""
        yield from self._written(self.file["nodes"])
        if evaluation := self.file.get("eval"):
            metric = self._output(evaluation["metric"])
            yield from call("g.evaluate", [("", metric), *_all(evaluation, "metric")])
        for name, spec in self.file.get("evaluations", {}).items():
            yield from call("g.evaluation", [("", name), *_all(spec)])
        yield from ("", "graph = g.graph()")

    def _head(self) -> Arguments:
        loop = self.file["loop"]
        said = [(key, self.file[key]) for key in ("doc", "params", "seed") if self.file.get(key)]
        named = [("loop", loop["name"])] if loop["name"] != "step" else []
        return [("", self.file["name"]), *said, ("steps", loop["times"]), *named]

    def _model(self, spec: Spec) -> Arguments:
        refresh, adapter = dict(spec.get("refresh") or {}), _under("rank", spec.get("adapter"))
        if refresh:
            refresh["from"] = _variable_of(refresh["from"], self.models)
        if "targets" in adapter:
            adapter["targets"] = _several(adapter["targets"])
        parts = [(f"refresh_{key}", value) for key, value in refresh.items()]
        parts += [(f"adapter_{key}", value) for key, value in adapter.items()]
        parts += [("base", _variable_of(spec["base"], self.models))] if spec.get("base") else []
        return [*_all(spec, "refresh", "adapter", "base"), *parts]

    def _written(self, nodes: Spec, depth: int = 0) -> Iterator[str]:
        """Each after those that it waits for, in the order of the file besides."""
        waiting = dict(nodes)
        while waiting:
            name = next(
                name for name, spec in waiting.items() if not _before(spec) & (waiting.keys() - {name})
            )
            spec = waiting.pop(name)
            made = self._region(name, spec) if spec["op"] == "repeat" else self._node(name, spec, depth)
            yield from (INDENT * depth + line for line in made)

    def _region(self, name: str, spec: Spec) -> Iterator[str]:
        arguments = [("", name), *self._after(spec), *_all(spec, "op", "after", "nodes", "until", "out")]
        variable = self._new_variable(name)
        yield from call("with g.repeat", arguments, end=f" as {variable}:")
        yield from self._written(spec["nodes"], 1)
        self.nodes[name] = variable
        until, out = spec.get("until"), spec.get("out", {})
        if until:
            keep = ("keep", self._output(until["keep"]))
            yield from call(f"{variable}.until", [*_all(until, "keep"), keep])
        if out:
            outputs = [(port, self._output(value)) for port, value in out.items()]
            yield from call(f"{variable}.out", outputs)

    def _node(self, name: str, spec: Spec, depth: int) -> Iterator[str]:
        said = [(key, spec[key]) for key in ("lengths", "out") if spec.get(key)]
        inputs = [(port, self._source(value)) for port, value in spec.get("in", {}).items()]
        repeat, options = _all(spec.get("repeat", {})), list(spec.get("with", {}).items())
        arguments = [*self._runs(spec), *self._after(spec), *said, *repeat, *inputs, *options]
        return self._made(name, spec["op"], arguments, self.nodes, depth)

    def _runs(self, spec: Spec) -> Arguments:
        """The function or the model, and the loss."""
        said: Arguments = [("", spec["fn"])] if "fn" in spec else []
        if use := _under("use", spec.get("model")):
            said += [("model", _variable_of(use["use"], self.models)), *_all(use, "use")]
        return [*said, ("loss", spec["loss"])] if "loss" in spec else said

    def _after(self, spec: Spec) -> Arguments:
        names = _several(spec.get("after", []))
        return [("after", [_variable_of(name, self.nodes) for name in names])] if names else []

    def _made(
        self, name: str, method: str, arguments: Arguments, variables: dict[str, str], depth: int = 0
    ) -> Iterator[str]:
        """A call, whose result has a variable if anything mentions it."""
        variable = self._new_variable(name) if name in self.mentioned else ""
        yield from call(
            f"{variable} = g.{method}" if variable else f"g.{method}", [("", name), *arguments], depth
        )
        if variable:
            variables[name] = variable

    def _new_variable(self, name: str) -> str:
        """The name, if Python and the program leave it free: a model and a node may have the same one."""
        taken = {*TAKEN, *self.models.values(), *self.nodes.values()}
        while keyword.iskeyword(name) or name in taken:
            name += "_"
        return name

    def _output(self, reference: str) -> Code | str:
        """`node.port`."""
        node, _, port = reference.partition(".")
        if not (variable := self.nodes.get(node)):
            return reference
        usable = not (keyword.iskeyword(port) or port.startswith("_") or port in METHODS)
        return Code(f"{variable}.{port}" if usable else f"{variable}[{literal(port)}]")

    def _source(self, value: str | Spec) -> Code | str:
        """An input of a node."""
        if isinstance(value, str):
            return self._output(value)
        if not value.get("lag"):
            return self._output(value["from"])
        rest = "".join(f", {key}={literal(said)}" for key, said in _all(value, "from"))
        return Code(f"g.previous({literal(self._output(value['from']))}{rest})")


def _before(spec: Spec) -> set[str]:
    """The nodes that a node waits for: it reads them or is after them, or a node inside it is."""
    found = set(_several(spec.get("after", [])))
    for value in spec.get("in", {}).values():
        source: Spec = {"from": value} if isinstance(value, str) else value
        found |= set() if source.get("lag") else {source["from"].partition(".")[0]}
    inner: Spec = spec.get("nodes", {})
    return found.union(*map(_before, inner.values())) - inner.keys()


def _mentioned(value: Any) -> Iterator[str]:
    """Every text in a file, before its first dot: among them the nodes and models that others name."""
    match value:
        case str():
            yield value.partition(".")[0]
        case Mapping():
            for each in cast(Spec, value).values():
                yield from _mentioned(each)
        case list() | tuple():
            for each in cast("list[Any]", value):
                yield from _mentioned(each)
        case _:
            pass


def _under(key: str, value: Any) -> dict[str, Any]:
    """A mapping, or what stands for its one key."""
    if value is None:
        return {}
    return dict(cast(Spec, value)) if isinstance(value, Mapping) else {key: value}


def _several(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _all(spec: Spec, *but: str) -> Arguments:
    return [(key, value) for key, value in spec.items() if key not in but and value is not None]


def _variable_of(name: str, variables: Mapping[str, str]) -> Code | str:
    """The variable of a model or a node; of one that has none, its name."""
    return Code(variables[name]) if name in variables else name
