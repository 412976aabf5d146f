"""What holds for a graph as a whole: who trains, who reads, what evaluation needs."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from hflow.diagnostics import did_you_mean
from hflow.graph.draft import Draft
from hflow.graph.graph import Graph, Node, Ref
from hflow.graph.problems import Problems
from hflow.graph.schema import EvalSpec, GraphSpec


def check_trained(drafts: Mapping[str, Draft], spec: GraphSpec, problems: Problems) -> None:
    """HF203 a frozen model is trained, HF215 a model is trained twice."""
    first: dict[str, str] = {}
    for draft in drafts.values():
        if draft.op != "train" or draft.model is None:
            continue
        model, path = draft.model.model, (*draft.path, "model")
        if model in spec.models and spec.models[model].frozen:
            help_ = "drop `frozen: true`, or train another model"
            problems.add("HF203", f"`{draft.name}` trains `{model}`, which is frozen", path, help=help_)
        if model in first:
            message = f"`{draft.name}` trains `{model}`, and so does `{first[model]}`"
            problems.add("HF215", message, path, help="one step trains a model once")
        first.setdefault(model, draft.name)


def check_evaluation(
    spec: EvalSpec,
    drafts: Mapping[str, Draft],
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
    _check_held_out(spec, ref, nodes, problems)


def _check_held_out(spec: EvalSpec, ref: Ref, nodes: Mapping[str, Node], problems: Problems) -> None:
    for name in sorted(ancestors(nodes, ref.node)):
        held_out = nodes[name].options.get("holdout") if nodes[name].op == "data" else None
        if held_out is not None and held_out < spec.rows:
            message = f"evaluation needs {spec.rows} held-out rows, but `{name}` holds out {held_out}"
            help_ = f"set `holdout: {spec.rows}` in `{name}`"
            problems.add("HF220", message, ("eval", "rows"), help=help_)


def ancestors(nodes: Mapping[str, Node], name: str) -> set[str]:
    """`name` and the nodes that it depends on within one step."""
    dag: nx.DiGraph[str] = nx.DiGraph()
    dag.add_nodes_from(nodes)
    dag.add_edges_from((i.source.node, n.name) for n in nodes.values() for i in n.inputs)
    return {name, *nx.ancestors(dag, name)}  # pyright: ignore[reportUnknownMemberType]


def check_temperatures(nodes: Mapping[str, Node], drafts: Mapping[str, Draft], problems: Problems) -> None:
    """HF212 the behaviour log-probs that a train node compares with are of another temperature."""
    for node in (n for n in nodes.values() if n.op == "train"):
        for value in node.inputs:
            made_by = value.type.provenance
            rollout = nodes.get(value.source.node)
            if rollout is None or made_by is None or made_by.role != "behaviour":
                continue
            sampled = rollout.options["temperature"] or 1.0  # greedy rollouts report log-probs at 1
            if sampled != node.options["temperature"]:
                message = (
                    f"`{node.name}` computes log-probs at temperature {node.options['temperature']},"
                    f" `{rollout.name}` sampled at {sampled}: their ratio would compare two distributions"
                )
                path = (*drafts[node.name].path, "with", "temperature")
                problems.add("HF212", message, path, help=f"set `temperature: {sampled}` in `{node.name}`")


def check_unused(graph: Graph, drafts: Mapping[str, Draft], problems: Problems) -> None:
    """Warnings: HF216 a trained model nobody reads, HF217 unread outputs, HF218 an unused model."""
    reads = {n.model.model for n in graph.nodes if n.op in ("generate", "score") and n.model}
    for node in graph.nodes:
        if node.op == "train" and node.model and reads and node.model.model not in reads:
            message = f"no node reads `{node.model.model}`, which `{node.name}` trains"
            _warn(problems, "HF216", message, ("nodes", node.name, "model"))
    read = {i.source.node for _, i in graph.edges()}
    read |= {graph.evaluation.metric.node} if graph.evaluation else set()
    for node in graph.nodes:
        if node.op in ("call", "score") and node.name not in read:
            message = f"no node reads what `{node.name}` computes"
            _warn(problems, "HF217", message, ("nodes", node.name))
    used = {n.model.model for n in graph.nodes if n.model}
    used |= {str(d.options["tokenizer"]) for d in drafts.values() if "tokenizer" in d.written}
    for model in graph.models:
        if model.name not in used:
            _warn(problems, "HF218", f"no node uses the model `{model.name}`", ("models", model.name))


def _warn(problems: Problems, code: str, message: str, path: tuple[str, ...]) -> None:
    named = path[-1] == "model"
    problems.add(code, message, path, key=not named, severity="warning")
