"""From a graph file to a typed `Graph`, or to all of its errors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.bounded_read import UnreadableError, read_text
from hflow.diagnostics import Diagnostic, HflowError, ordered
from hflow.graph.adapter import ADAPTER_TARGETS, Adapter, AdapterTarget, AnyAdapter, StoredAdapter
from hflow.graph.checks.adapters import check_adapters
from hflow.graph.checks.bases import check_bases
from hflow.graph.checks.checks import (
    check_delta_weights,
    check_evaluation,
    check_in_flight,
    check_lags,
    check_optimizers,
    check_refresh,
    check_trained,
    check_unused,
)
from hflow.graph.checks.evaluations import check_evaluations
from hflow.graph.checks.log_probs import check_sampled_tokens, check_sampler, check_staleness
from hflow.graph.checks.run import check_reward, check_run, drafted_metric_names
from hflow.graph.checks.training import check_freezes, check_schedules
from hflow.graph.checks.typed import typed_nodes
from hflow.graph.infer.bases import settled_dtypes, shared_bases
from hflow.graph.infer.drafting import draft_nodes, node_names
from hflow.graph.infer.regions import check_ages, check_borders
from hflow.graph.infer.wiring import check_wiring
from hflow.graph.ir import Evaluation, Graph, Model, Ref, Refresh, Region, metric_key
from hflow.graph.run_config import RunConfig
from hflow.graph.source import overrides as overriding
from hflow.graph.source.document import MAX_BYTES, Document, dump, parse, read
from hflow.graph.source.expressions import names_read, substitute
from hflow.graph.source.extends import inherit, lineage, overlay
from hflow.graph.source.problems import Problems
from hflow.graph.source.run_section import config_of, is_of_run, is_only_run, without_run
from hflow.graph.source.schema import AdapterSpec, GraphSpec, RepeatNodeSpec
from hflow.graph.source.validate import validate
from hflow.shipped import find_graph


@dataclass(frozen=True)
class Checked:
    """All that a right graph file says: the graph, how its runs are kept, and the warnings."""

    graph: Graph
    config: RunConfig
    warnings: tuple[Diagnostic, ...]


def load(path: Path | str, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()) -> Graph:
    """The graph in a file, merged over the file that it `extends`; then partial graph `files` are merged over
    it, and ``key.path=value`` overrides applied. The bare name of an algorithm stands for its file.

    Raises:
        HflowError: with every error of the file, in reading order.
    """
    return check(path, overrides, files)[0]


def load_text(text: str, file: str = "<text>", overrides: Sequence[str] = ()) -> Graph:
    """As `load`, from text. Parents, and functions named by file, are looked up beside `file`."""
    return check_text(text, file, overrides)[0]


def check(
    path: Path | str, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """The graph in a file, and its warnings. Raises as `load`."""
    return check_document(read_graph(path), overrides, files)


def run_config(
    path: Path | str, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()
) -> RunConfig:
    """How runs of the graph in a file are kept. Raises as `load`."""
    return checked(read_graph(path), overrides, files).config


def read_graph(path: Path | str) -> Document:
    """The document in a graph file, or in that of the algorithm of that name.

    Raises:
        HflowError: HF001 when there is none, HF001..HF005 as `read`.
    """
    return read(find_graph(path))


def check_text(
    text: str, file: str = "<text>", overrides: Sequence[str] = ()
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """The graph in `text`, and its warnings. Raises as `load`."""
    return check_document(parse(text, file), overrides)


def sources(
    path: Path | str, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()
) -> dict[str, str]:
    """The texts that the places of diagnostics refer to, for `hflow.diagnostics.render`."""
    try:
        path = find_graph(path)
        parents = [d.file for d in lineage(read(path))[1:]]
    except HflowError:  # the diagnostic that says so points into the child
        parents = []
    texts = {str(file): _text(file) for file in (path, *parents, *files)}
    return {**texts, **{overriding.file_of(o): o for o in overrides}}


def _text(path: Path | str) -> str:
    try:
        return read_text(path, MAX_BYTES, "utf-8-sig")
    except UnreadableError:  # then no diagnostic points into it
        return ""


def assembled(
    document: Document, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()
) -> Document:
    """What a file, its parents, partial graph files and overrides say together, before any expression is
    evaluated. Every value keeps the place that it came from.

    Raises:
        HflowError: HF107 for parents and `files`, HF105 for `overrides`; HF001..HF005 for files that cannot
            be read.
    """
    return overriding.override(overlay(inherit(document), _partials(files)), overrides)


def _partials(files: Sequence[Path | str]) -> list[Document]:
    return [read(file) for file in files]


def check_document(
    document: Document, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """The graph that a document describes, and its warnings. Raises as `load`."""
    found = checked(document, overrides, files)
    return found.graph, found.warnings


def checked(document: Document, overrides: Sequence[str] = (), files: Sequence[Path | str] = ()) -> Checked:
    """What a document says, with partial graph files and overrides over it. Raises as `load`."""
    written, partials = inherit(document), _partials(files)
    over = overlay(written, partials)
    merged = overriding.override(over, overrides)
    evaluated, in_expressions, failed = substitute(merged, names_read(written) | names_read(over))
    spec, in_shape = validate(evaluated, failed)
    problems = Problems(evaluated)
    problems.found.extend((*in_expressions, *in_shape))
    graph = _graph(spec, evaluated, problems) if spec else None
    if any(p.severity == "error" for p in problems.found):
        raise HflowError(ordered(p for p in problems.found if p.severity == "error"))
    assert graph and spec
    origins = _origins(document, overrides, partials)
    text = dump(without_run(merged), origins) if origins else without_run(document).text
    return Checked(replace(graph, text=text), config_of(spec.run), ordered(problems.found))


def _origins(document: Document, overrides: Sequence[str], partials: Sequence[Document]) -> str:
    """A remark on what was merged into the graph of the document; empty when nothing was."""
    parent = document.get(("extends",))
    over = [f"over {parent.value}"] if parent else []
    files = [f"-f {partial.file}" for partial in partials if not is_only_run(partial)]
    given = [*files, *(o for o in overrides if not is_of_run(o))]
    return ", ".join([*over, *([f"with {', '.join(given)}"] if given else [])])


def _graph(spec: GraphSpec, document: Document, problems: Problems) -> Graph | None:
    """The graph that `spec` describes; None, or not all of it, when problems were found."""
    declared = node_names(document)
    drafts = draft_nodes(spec, document, problems)
    check_wiring(drafts, declared, problems)
    check_borders(drafts, problems)
    nodes = typed_nodes(drafts, problems)
    check_trained(drafts, spec, problems)
    check_lags(drafts, problems)
    check_delta_weights(drafts, spec, problems)
    check_in_flight(drafts, problems)
    check_ages(drafts, problems)
    check_optimizers(nodes, drafts, problems)
    check_refresh(drafts, spec, problems)
    check_adapters(drafts, spec, problems)
    check_bases(drafts, spec, problems)
    check_staleness(nodes, drafts, problems)
    check_sampler(nodes, drafts, problems)
    check_sampled_tokens(nodes, drafts, problems)
    check_schedules(nodes, drafts, spec.loop.times, problems)
    check_freezes(nodes, drafts, problems)
    if spec.eval:
        check_evaluation(spec.eval, drafts, nodes, declared, problems)
    evaluations = check_evaluations(spec, drafts, nodes, declared, problems)
    if spec.run:
        keys = frozenset(metric_key(name, m) for name, own in spec.evaluations.items() for m in own.metrics)
        check_run(spec.run, drafted_metric_names(drafts, declared, keys), problems)
    if any(p.severity == "error" for p in problems.found):
        return None
    assert nodes.keys() == drafts.keys(), "a node without a type has an error"
    graph = Graph(
        spec.name,
        spec.doc,
        spec.params,
        _models(spec, document),
        tuple(nodes.values()),
        (Region(spec.loop.name, spec.loop.times), *_regions(spec)),
        _evaluation(spec),
        spec.seed,
        evaluations=evaluations,
    )
    check_unused(graph, drafts, problems)
    if spec.run:
        check_reward(spec.run, graph, problems)
    return graph


def _models(spec: GraphSpec, document: Document) -> tuple[Model, ...]:
    """Without those that are another one's base."""
    shared, dtypes = shared_bases(spec), settled_dtypes(spec)
    return tuple(
        Model(
            name,
            m.path,
            m.head,
            m.frozen,
            dtypes[name],
            Refresh(m.refresh.from_, m.refresh.every, m.refresh.decay) if m.refresh else None,
            _adapter(m.adapter) if m.adapter else None,
            m.base,
            document.span(("models", name), key=True),
        )
        for name, m in spec.models.items()
        if name not in shared
    )


def _adapter(spec: AdapterSpec) -> AnyAdapter:
    """Targets in the order of the forward pass, each once."""
    targets: tuple[AdapterTarget, ...] = tuple(t for t in ADAPTER_TARGETS if t in spec.targets)
    if spec.path is not None:
        said = spec.model_fields_set
        alpha, again = spec.alpha if "alpha" in said else None, targets if "targets" in said else None
        return StoredAdapter(spec.path, spec.rank, alpha, again, spec.dropout)
    assert spec.rank is not None, "which is checked"
    return Adapter(spec.rank, spec.alpha, targets, spec.dropout)


def _regions(spec: GraphSpec) -> tuple[Region, ...]:
    return tuple(
        Region(
            name,
            node.times,
            Ref(*node.until.keep.split(".")),
            node.until.rows,
            spec.loop.name,
            node.until.max_age,
        )
        for name, node in spec.nodes.items()
        if isinstance(node, RepeatNodeSpec)
    )


def _evaluation(spec: GraphSpec) -> Evaluation | None:
    if spec.eval is None:
        return None
    return Evaluation(Ref(*spec.eval.metric.split(".")), spec.eval.rows, spec.eval.every)
