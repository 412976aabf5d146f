"""From a graph file to a typed `Graph`, or to all of its errors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, ordered
from hflow.graph import overrides as overriding
from hflow.graph.checks import check_evaluation, check_temperatures, check_trained, check_unused
from hflow.graph.drafting import draft_nodes
from hflow.graph.expressions import substitute
from hflow.graph.graph import Evaluation, Graph, Model, Ref, Region
from hflow.graph.infer import infer
from hflow.graph.problems import Problems
from hflow.graph.schema import GraphSpec
from hflow.graph.source import Document, dump, parse, read
from hflow.graph.validate import validate
from hflow.graph.wiring import check_wiring, order


def load(path: Path | str, overrides: Sequence[str] = ()) -> Graph:
    """The graph in a file, with ``key.path=value`` overrides applied.

    Raises:
        HflowError: with every error of the file, in reading order.
    """
    return check(path, overrides)[0]


def load_text(text: str, file: str = "<text>", overrides: Sequence[str] = ()) -> Graph:
    """As `load`, from text. Functions named by file are looked up beside `file`."""
    return check_text(text, file, overrides)[0]


def check(path: Path | str, overrides: Sequence[str] = ()) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """The graph in a file, and its warnings. Raises as `load`."""
    return _check(read(path), overrides)


def check_text(
    text: str, file: str = "<text>", overrides: Sequence[str] = ()
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """The graph in `text`, and its warnings. Raises as `load`."""
    return _check(parse(text, file), overrides)


def sources(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The texts that the places of diagnostics refer to, for `hflow.diagnostics.render`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError):  # then no diagnostic points into it
        text = ""
    return {str(path): text, **{overriding.file_of(o): o for o in overrides}}


def _check(document: Document, overrides: Sequence[str]) -> tuple[Graph, tuple[Diagnostic, ...]]:
    written = overriding.override(document, overrides)
    document, in_expressions, failed = substitute(written)
    spec, in_shape = validate(document, failed)
    problems = Problems(document)
    problems.found.extend((*in_expressions, *in_shape))
    graph = _graph(spec, document, problems) if spec else None
    if any(p.severity == "error" for p in problems.found):
        raise HflowError(ordered(p for p in problems.found if p.severity == "error"))
    assert graph
    text = dump(written, f"with {', '.join(overrides)}") if overrides else written.text
    return replace(graph, text=text), ordered(problems.found)


def _graph(spec: GraphSpec, document: Document, problems: Problems) -> Graph | None:
    """The graph that `spec` describes; None, or not all of it, when problems were found."""
    declared = document.keys(("nodes",))
    drafts = draft_nodes(spec, document, problems)
    check_wiring(drafts, declared, problems)
    nodes = infer(drafts, order(drafts, problems), problems)
    check_trained(drafts, spec, problems)
    check_temperatures(nodes, drafts, problems)
    if spec.eval:
        check_evaluation(spec.eval, drafts, nodes, declared, problems)
    if problems.found:
        return None
    graph = Graph(
        spec.name,
        spec.doc,
        spec.params,
        _models(spec, document),
        tuple(nodes.values()),
        (Region(spec.loop.name, spec.loop.times),),
        _evaluation(spec),
        spec.seed,
    )
    check_unused(graph, drafts, problems)
    return graph


def _models(spec: GraphSpec, document: Document) -> tuple[Model, ...]:
    return tuple(
        Model(name, m.path, m.head, m.frozen, m.dtype, document.span(("models", name), key=True))
        for name, m in spec.models.items()
    )


def _evaluation(spec: GraphSpec) -> Evaluation | None:
    if spec.eval is None:
        return None
    return Evaluation(Ref(*spec.eval.metric.split(".")), spec.eval.rows, spec.eval.every)
