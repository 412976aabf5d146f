"""The edges of a file, before types: do they lead anywhere, is everything connected, is it acyclic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx

from hflow.diagnostics import did_you_mean
from hflow.graph.infer.draft import NodeDraft
from hflow.graph.infer.kinds import score
from hflow.graph.infer.regions import readable, reads_in
from hflow.graph.ir import Ref
from hflow.graph.source.problems import Problems

DERIVED = "mask"  # the one input that may be left out because its type says where it comes from


def check_wiring(drafts: Mapping[str, NodeDraft], declared: Iterable[str], problems: Problems) -> None:
    """HF201 unknown references, HF222 outputs of another head, HF214 unknown inputs, HF207 missing ones,
    HF225 carried texts.

    `declared` names all nodes of the file; those without a draft have been reported already.
    """
    names = set(declared)
    for draft in drafts.values():
        for port, ref in draft.sources.items():
            if not _may_exist(ref, drafts, names):
                code, message, help_ = _unknown(draft, ref, drafts)
                problems.add(code, message, draft.input_path(port), help=help_)
        for number, name in enumerate(draft.after):
            if name not in names:
                help_ = did_you_mean(name, names, "nodes")
                problems.add("HF201", f"no node `{name}`", (*draft.path, "after", number), help=help_)
        _check_ports(draft, problems)


def _may_exist(ref: Ref, drafts: Mapping[str, NodeDraft], names: set[str]) -> bool:
    draft = drafts.get(ref.node)
    if draft is None:
        return ref.node in names
    return draft.outputs is None or ref.port in draft.outputs


def _unknown(draft: NodeDraft, ref: Ref, drafts: Mapping[str, NodeDraft]) -> tuple[str, str, str]:
    """Code, message and help for a reference that leads nowhere."""
    producer = drafts.get(ref.node)
    needs = score.head_of(ref.port)
    if producer and producer.op == "train" and needs and producer.head == needs:
        kinds = "generate or score" if ref.port == "logprobs" else "score"
        help_ = f"it computes its own while it trains: wire the `{ref.port}` of a {kinds} node"
        return "HF201", f"`{ref.node}` hands out no `{ref.port}`", help_
    if producer and producer.model and producer.head and needs:
        model = producer.model.model
        message = f"`{ref}`: `{ref.node}` uses `{model}`, which has `head: {producer.head}`"
        return "HF222", message, f"`{ref.port}` takes a model with `head: {needs}`"
    readable = (d for d in drafts.values() if d.region == reads_in(draft))
    refs = {str(Ref(d.name, port)) for d in readable for port in d.outputs or ()}
    return "HF201", f"no node produces `{ref}`", did_you_mean(str(ref), refs, "values")


def _check_ports(draft: NodeDraft, problems: Problems) -> None:
    if draft.inputs is None:
        return
    known = [p.name for p in draft.inputs]
    computed = draft.function.trained if draft.function else ()
    unknown = [port for port in draft.sources if port not in known]
    for port in unknown:
        message, help_ = f"`{draft.name}` has no input `{port}`", did_you_mean(port, known, "inputs")
        if port in computed:
            message, help_ = f"`{draft.name}` computes `{port}` itself", "remove this line"
        path = (*draft.path, "in", port)
        problems.add("HF214", message, path, key=True, help=problems.with_removal(help_, path))
    if unknown:  # most likely a misspelling of what would be missing
        return
    for port in draft.inputs:
        if port.name in draft.carried and not port.type.scalar and draft.op != "data":
            message = f"`{port}` of `{draft.name}` cannot be of an earlier step"
            help_ = "only scalars, `f32[]`, are carried from step to step"
            problems.add("HF225", message, draft.input_path(port.name), help=help_)
        if port.name not in draft.sources and not port.optional and port.name != DERIVED:
            message = f"`{draft.name}` lacks its input `{port}`"
            problems.add("HF207", message, draft.path, key=True)
    needs: Mapping[str, str] = draft.function.needs if draft.function else {}
    for option, port in needs.items():
        if draft.options.get(option) and port not in draft.sources:
            message = f"`{option}: {draft.options[option]}` of `{draft.name}` needs its input `{port}`"
            problems.add(
                "HF207", message, (*draft.path, "with", option), help=f"wire `{port}`, or drop `{option}`"
            )


def step_dag(drafts: Mapping[str, NodeDraft]) -> nx.DiGraph[str]:
    """Which node comes before which within one step, by values and by `after`."""
    dag: nx.DiGraph[str] = nx.DiGraph()
    dag.add_nodes_from(drafts)
    for draft in drafts.values():
        now = [ref for port, ref in draft.sources.items() if port not in draft.carried]
        real = (r for r in now if readable(draft, r, drafts) and _may_exist(r, drafts, set()))
        dag.add_edges_from((r.node, draft.name) for r in real)
        waiting = [draft.name, *(d.name for d in drafts.values() if d.region == draft.name)]
        dag.add_edges_from((name, n) for name in draft.after if name in drafts for n in waiting)
    return dag


def order(drafts: Mapping[str, NodeDraft], problems: Problems) -> list[str]:
    """Node names so that producers come first, else in file order. Nodes in or after a cycle are left
    out, and each cycle is reported as HF204."""
    dag = step_dag(drafts)
    position = {name: index for index, name in enumerate(drafts)}
    in_cycle: set[str] = set()
    for knot in nx.strongly_connected_components(dag):
        first = min(knot, key=position.__getitem__)
        back = [n for n in dag.predecessors(first) if n in knot]
        if not back:
            continue
        ways = [nx.shortest_path(dag, first, last) for last in back]  # pyright: ignore[reportUnknownMemberType]
        cycle = min(ways, key=len)
        message = "cycle within one step: " + " -> ".join([*cycle, first])
        help_ = "a scalar of the step before is read as `{from: node.port, lag: 1, init: 0.0}`"
        problems.add("HF204", message, drafts[first].path, key=True, help=help_)
        in_cycle |= knot
    after = {n for k in in_cycle for n in nx.descendants(dag, k)}  # pyright: ignore[reportUnknownMemberType]
    dag.remove_nodes_from(in_cycle | after)
    return list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))
