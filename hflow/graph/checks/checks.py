"""What holds for a graph as a whole: who trains, who reads, what evaluation needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import networkx as nx

from hflow.diagnostics import did_you_mean
from hflow.graph.checks.distributions import behind
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds.train import SHARED
from hflow.graph.infer.wiring import step_dag
from hflow.graph.ir import Graph, NamedEvaluation, Node, Ref, step_node
from hflow.graph.row_sources import overlap
from hflow.graph.source.document import KeyPath
from hflow.graph.source.problems import Problems
from hflow.graph.source.schema import EvalSpec, GraphSpec
from hflow.graph.types import group_size

_OF_LENGTH = ("hflow.ops.penalties.overlong_penalty", "hflow.ops.penalties.length_penalty")


def check_trained(drafts: Mapping[str, NodeDraft], spec: GraphSpec, problems: Problems) -> None:
    """HF203 a frozen model is trained, HF215 a model is trained twice without order."""
    dag = step_dag(drafts)
    earlier: dict[str, list[str]] = {}
    for draft in drafts.values():
        if draft.op != "train" or draft.model is None or draft.in_region:  # which is HF224
            continue
        model, path = draft.model.model, (*draft.path, "model")
        if model in spec.models and spec.models[model].frozen:
            help_ = "drop `frozen: true`, or train another model"
            problems.add("HF203", f"`{draft.name}` trains `{model}`, which is frozen", path, help=help_)
        for other in earlier.get(model, []):
            if not (nx.has_path(dag, other, draft.name) or nx.has_path(dag, draft.name, other)):
                message = f"`{draft.name}` trains `{model}`, and so does `{other}`, without order"
                problems.add("HF215", message, path, help=f"say which comes first: `after: [{other}]`")
                break
        earlier.setdefault(model, []).append(draft.name)


def check_lags(drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF212 a node reads older weights of a model that never changes."""
    trained = {d.model.model for d in drafts.values() if d.op == "train" and d.model}
    for draft in drafts.values():
        if draft.model and draft.model.lag and draft.head and draft.model.model not in trained:
            message = f"`lag` has no effect: no node trains `{draft.model.model}`"
            problems.add("HF212", message, (*draft.path, "model", "lag"), key=True)


def check_delta_weights(drafts: Mapping[str, NodeDraft], spec: GraphSpec, problems: Problems) -> None:
    """HF212 a node gets changed weights alone of which it keeps no copy, or that are few anyway."""
    for draft in drafts.values():
        if not draft.model or draft.model.delta_weights is None or draft.model.model not in spec.models:
            continue
        name, path = draft.model.model, (*draft.path, "model", "delta_weights")
        if not draft.model.lag:
            message = f"`{draft.name}` reads the newest weights, and keeps no copy of those before"
            problems.add("HF212", message, path, key=True, help="let it read older ones: `lag: 1`")
        elif spec.models[name].adapter:
            message = f"`delta_weights` has no effect: of `{name}` the adapter alone is sent"
            problems.add("HF212", message, path, key=True)


def check_in_flight(drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF212 a node would take over weights in flight that never come while it samples."""
    for draft in drafts.values():
        if not draft.options.get("in_flight") or not draft.model:
            continue
        path = (*draft.path, "with", "in_flight")
        if draft.in_region:
            message = "`in_flight` has no effect: weights do not change during the rounds of a region"
            problems.add("HF212", message, path, key=True)
        elif not draft.model.lag:
            message = f"`in_flight` has no effect: `{draft.name}` waits for the newest weights"
            help_ = f"let it begin with older ones: `model: {{use: {draft.model.model}, lag: 1}}`"
            problems.add("HF212", message, path, key=True, help=help_)


def check_optimizers(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF212 train nodes of one model, which share its optimizer, disagree on what it is."""
    first: dict[str, Node] = {}
    for node in (n for n in nodes.values() if n.op == "train"):
        other = first.setdefault(node.model_use.model, node)
        for option in SHARED:
            mine, theirs = node.options.get(option), other.options.get(option)
            if mine is None or theirs is None or mine == theirs:
                continue
            message = (
                f"`{node.name}` and `{other.name}` train one model, but `{option}` is {mine} and {theirs}"
            )
            path = (*drafts[node.name].path, "with", option)
            problems.add("HF212", message, path, help="a model has one optimizer: write the same in both")


def check_groups(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF219 a function that compares the samples of a prompt gets too few."""
    for node in nodes.values():
        least = node.function.min_group if node.function else 1
        if least == 1:
            continue
        ports = {p.name: p for p in drafts[node.name].inputs or () if p.type.dims}
        grouped = [i for i in node.inputs if i.port in ports and len(ports[i.port].type.dims[0].factors) > 1]
        for value in grouped[:1]:
            size = group_size(value.type.dims[0], ports[value.port].type.dims[0])
            if size < least:
                message = f"`{node.name}` compares {least} samples of a prompt or more, and gets {size}"
                help_ = "let the generate node draw more: `n`"
                problems.add("HF219", message, drafts[node.name].input_path(value.port), help=help_)


def check_counted(nodes: Mapping[str, Node], drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """HF212 a penalty on length counts no token of the longest responses, since they are dropped."""
    for node in nodes.values():
        mask = node.input("mask") if node.function and node.function.reference in _OF_LENGTH else None
        source = behind(mask.source, nodes) if mask else None
        if source is None or not source.options.get("mask_truncated"):
            continue
        message = f"`{node.name}` counts no token of the responses that `{source.name}` drops, the longest"
        help_ = "penalise them, or drop them with `mask_truncated`"
        problems.add("HF212", message, drafts[node.name].input_path("mask"), help=help_)


def check_refresh(drafts: Mapping[str, NodeDraft], spec: GraphSpec, problems: Problems) -> None:
    """HF202 an unknown model, HF226 a model that cannot take over the weights of another."""
    trained = {d.model.model for d in drafts.values() if d.op == "train" and d.model}
    for name, model in spec.models.items():
        source = model.refresh.from_ if model.refresh else None
        if source is None:
            continue
        path = ("models", name, "refresh", "from")
        if problems.document and source not in problems.document.keys(("models",)):
            help_ = did_you_mean(source, spec.models, "models")
            problems.add("HF202", f"unknown model `{source}`", path, help=help_)
        elif not model.frozen:
            message = f"`{name}` takes over the weights of `{source}`, so it cannot be trained"
            problems.add("HF226", message, path, help="add `frozen: true`")
        elif source not in trained and source in spec.models:
            problems.add("HF226", f"no node trains `{source}`, so `{name}` would never change", path)
        elif source in spec.models and spec.models[source].head != model.head:
            message = f"`{name}` has `head: {model.head}`, `{source}` has `head: {spec.models[source].head}`"
            problems.add("HF226", message, path, help="a model takes over weights of its own shape")


def check_evaluation(
    spec: EvalSpec,
    drafts: Mapping[str, NodeDraft],
    nodes: Mapping[str, Node],
    declared: tuple[str, ...],
    problems: Problems,
) -> None:
    """HF201 the metric does not exist, HF220 it is no metric or has too few held-out rows.

    `declared` names all nodes of the file, those with errors too.
    """
    ref = Ref(*spec.metric.split("."))
    draft, path = drafts.get(ref.node), ("eval", "metric")
    unknown_port = draft is not None and draft.outputs is not None and ref.port not in draft.outputs
    if unknown_port or ref.node not in declared:
        refs = [str(Ref(d.name, port)) for d in drafts.values() for port in d.outputs or ()]
        help_ = did_you_mean(str(ref), refs, "values")
        problems.add("HF201", f"no node produces `{ref}`", path, help=help_)
        return
    node = nodes.get(ref.node)
    output = node.output(ref.port) if node else None
    if output is None:  # its node has an error
        return
    if output.type.dtype != "f32" or len(output.type.dims) != 1:
        problems.add("HF220", f"a metric is `f32[rows]`, but `{ref}` is `{output.type}`", path)
        return
    if regions := sorted(name for name in ancestors(nodes, ref.node) if nodes[name].op == "repeat"):
        message = f"`{ref}` depends on the region `{regions[0]}`, and evaluation runs no rounds"
        inner = node.input(ref.port) if node and node.op == "repeat" else None
        what = f"`{inner.source}`, which" if inner else "a value that"
        help_ = f"measure {what} is made inside the region"
        problems.add("HF220", message, path, help=help_)
    measured = ancestors(nodes, ref.node)
    check_held_out(spec.rows, measured, nodes, ("eval", "rows"), problems)
    check_kept_apart(spec.rows, measured, nodes, drafts, problems)


def check_held_out(
    rows: int, measured: Set[str], nodes: Mapping[str, Node], path: KeyPath, problems: Problems
) -> None:
    """HF220 at `path`: a data node among those `measured` holds out fewer rows than an evaluation wants."""
    for name in sorted(measured):
        held_out = nodes[name].options.get("holdout") if nodes[name].op == "data" else None
        if held_out is not None and held_out < rows:
            message = f"evaluation needs {rows} held-out rows, but `{name}` holds out {held_out}"
            help_ = f"set `holdout: {rows}` in `{name}`"
            if nodes[name].options.get("streaming"):
                help_ = "rows that are streamed are not held out: name an evaluation with `data` of its own"
            problems.add("HF220", message, path, help=help_)


def check_kept_apart(
    rows: int,
    measured: Set[str],
    nodes: Mapping[str, Node],
    drafts: Mapping[str, NodeDraft],
    problems: Problems,
) -> None:
    """HF220: another data node draws from the dataset that evaluation holds rows out of."""
    evaluated = [
        nodes[n] for n in sorted(measured) if nodes[n].op == "data" and "dataset" in nodes[n].options
    ]
    for node in (n for n in nodes.values() if n.op == "data" and n.name not in measured):
        held_out = node.options.get("holdout")
        if "dataset" not in node.options or held_out is None:  # a bad value, which has been reported
            continue
        shared = {n.name: overlap(node.options, n.options) for n in evaluated}
        name = next((n for n, rows_of in shared.items() if rows_of != "none"), None)
        if name is None or (shared[name] == "within" and held_out >= rows):
            continue
        message = f"`{node.name}` draws the rows that `{name}` holds out: they are of one dataset"
        help_ = f"set `holdout: {rows}` in `{node.name}`"
        if shared[name] == "beyond":  # the prompts of the smallest hashes of more rows are others
            help_ = f"give `{node.name}` no rows of it that `{name}` lacks: the same `split` and `filter`"
        problems.add("HF220", message, drafts[node.name].path, key=True, help=help_)


def ancestors(nodes: Mapping[str, Node], name: str) -> set[str]:
    """`name` and the nodes that it depends on within one step; a data node depends on none."""
    dag: nx.DiGraph[str] = nx.DiGraph()
    dag.add_nodes_from(nodes)
    reading = (n for n in nodes.values() if n.op != "data")
    dag.add_edges_from((i.source.node, n.name) for n in reading for i in n.inputs if i.source.node in nodes)
    return {name, *nx.ancestors(dag, name)}  # pyright: ignore[reportUnknownMemberType]


def check_unused(graph: Graph, drafts: Mapping[str, NodeDraft], problems: Problems) -> None:
    """Warnings: HF216 a trained model nobody reads, HF217 unread outputs, HF218 an unused model."""
    reads = {n.model.model for n in graph.nodes if n.op in ("generate", "score") and n.model}
    reads |= {m.refresh.model for m in graph.models if m.refresh}
    samples = any(n.op == "generate" for n in graph.nodes)  # without, a model may be trained for its own sake
    for node in graph.nodes:
        if node.op == "train" and node.model and samples and node.model.model not in reads:
            message = f"no node reads `{node.model.model}`, which `{node.name}` trains"
            _warn(problems, "HF216", message, (*drafts[node.name].path, "model"))
    read = {i.source for node, i in graph.edges() if i.source.node != node.name}
    read |= {graph.evaluation.metric} if graph.evaluation else set()
    read |= {ref for evaluation in graph.evaluations for ref in _measured(evaluation)}
    nodes_read = {ref.node for ref in read}
    for node in graph.nodes:
        path = drafts[node.name].path
        if node.op in ("call", "score") and node.name not in nodes_read:
            _warn(problems, "HF217", f"no node reads what `{node.name}` computes", path)
        for output in node.outputs if node.op == "repeat" else ():
            if Ref(node.name, output.port) not in read:
                message = f"no node reads `{node.name}.{output.port}`"
                _warn(problems, "HF217", message, (*path, "out", output.port))
    used = {n.model.model for n in graph.nodes if n.model}
    used |= {m.refresh.model for m in graph.models if m.refresh}
    used |= {str(d.options["tokenizer"]) for d in drafts.values() if "tokenizer" in d.written}
    for model in graph.models:
        if model.name not in used:
            _warn(problems, "HF218", f"no node uses the model `{model.name}`", ("models", model.name))


def _measured(evaluation: NamedEvaluation) -> Iterator[Ref]:
    """The values of the step that the metrics of an evaluation read."""
    for metric in evaluation.metrics:
        if metric.kind == "mean":
            yield Ref(*metric.source.split("."))
    for value in (value for node in evaluation.nodes if "/" in node.name for value in node.inputs):
        yield Ref(step_node(value.source.node), value.source.port)


def _warn(problems: Problems, code: str, message: str, path: KeyPath) -> None:
    named = path[-1] == "model"
    problems.add(code, message, path, key=not named, severity="warning")
