"""For every node with a model: the parallel plans worth considering, fastest first.

A plan is kept if all sizes divide (heads, layers, vocabulary, rows) and its micro-batch fits. Nodes
that train one model share its optimizer, so they are planned together, for one mesh. Nodes without a
model have no candidates: they run where their values lie (`place`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from hflow.compiler.cost.compute import node_time_s
from hflow.compiler.cost.memory import weight_bytes, working_bytes
from hflow.compiler.draft import Candidate, Draft
from hflow.compiler.layout import Mesh
from hflow.compiler.pins import AXES, Pin
from hflow.compiler.shape import ModelShape
from hflow.compiler.workload import Workload, workload
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.graph import Graph, Node


def candidates(draft: Draft) -> Draft:
    """Raises HF304 (or HF302 for a pinned node) with the reason of every layout that was refused."""
    found: dict[str, tuple[Candidate, ...]] = {}
    errors: list[Diagnostic] = []
    for nodes in planned_together(draft.graph):
        pins = [p for p in draft.pins if p.node in {n.name for n in nodes}]
        options, refusals = _options(draft, nodes, pins)
        if not options:
            errors.append(_nothing_fits(nodes, pins, refusals))
        for node, own in zip(nodes, zip(*sorted(options, key=_cost))):
            found[node.name] = own
    if not found and not errors:
        message = f"no node of `{draft.graph.name}` uses a model, so there is nothing to place"
        errors.append(Diagnostic("HF304", message, help="add a generate, score or train node"))
    if errors:
        raise HflowError(errors)
    return replace(draft, candidates=found)


def planned_together(graph: Graph) -> list[tuple[Node, ...]]:
    """The nodes with a model; those that train the same one as one tuple."""
    together: dict[str, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.model:
            nodes = graph.trainers(node.model.model) if node.op == "train" else (node,)
            together.setdefault(nodes[0].name, nodes)
    return list(together.values())


def _options(
    draft: Draft, nodes: Sequence[Node], pins: Sequence[Pin]
) -> tuple[list[tuple[Candidate, ...]], dict[str, str]]:
    """A candidate per node for each mesh on which all of them can run, and why not on the other meshes."""
    options: list[tuple[Candidate, ...]] = []
    refusals: dict[str, str] = {}
    for mesh in _meshes(draft, pins):
        if options and not pins and len(mesh.devices) < len(options[0][0].devices):
            break  # fewer devices only when nothing runs on more
        results = [_candidate(draft, node, mesh) for node in nodes]
        if refused := [r for r in results if isinstance(r, str)]:
            refusals[str(mesh)] = refused[0]
        else:
            options.append(tuple(r for r in results if isinstance(r, Candidate)))
    return options, refusals


def _cost(option: tuple[Candidate, ...]) -> tuple[float, int]:
    return sum(c.time_s for c in option), max(c.working_bytes for c in option)


def _meshes(draft: Draft, pins: Sequence[Pin]) -> Iterator[Mesh]:
    """Meshes to try that all pins admit, on as many devices as possible first."""
    sizes = [size for pin in pins for size in pin.sizes]
    pinned = {pin.devices for pin in pins if pin.devices}
    if len(pinned) > 1:
        return
    everything = next(iter(pinned), None) or draft.cluster.devices
    counts = [len(everything)] if pinned else range(len(everything), 0, -1)
    for count in counts:
        for pp, tp in ((p, t) for p in _divisors(count) for t in _divisors(count // p)):
            mesh = Mesh.of(everything[:count], pp=pp, dp=count // (pp * tp), tp=tp)
            if all(mesh.size(axis) == size for axis, size in sizes if axis in AXES):
                yield mesh


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _candidate(draft: Draft, node: Node, mesh: Mesh) -> Candidate | str:
    """The candidate, or the reason why this mesh is no choice."""
    assert node.model
    model, shape = draft.graph.model(node.model.model), draft.shapes[node.model.model]
    work = workload(node)
    reason = _model_reason(shape, mesh, node) or _rows_reason(draft, node, work, mesh)
    if reason:
        return reason
    budget = draft.cluster.device.memory_bytes - weight_bytes(shape, model.dtype, mesh, node.op == "train")
    fits = [
        micro
        for micro in _micro_batches(node, work, mesh)
        if working_bytes(node.op, shape, model.dtype, work, mesh, micro) <= budget
    ]
    if not fits:
        capacity = draft.cluster.device.memory_bytes / 1e9
        return f"the weights and the smallest micro-batch exceed {capacity:.3g} GB"
    timed = [(node_time_s(node.op, shape, model.dtype, work, mesh, m, draft.cluster), m) for m in fits]
    time_s, micro = min(timed)
    memory = working_bytes(node.op, shape, model.dtype, work, mesh, micro)
    return Candidate(mesh.pp, mesh.dp, mesh.tp, mesh.devices, micro, time_s, memory)


def _model_reason(shape: ModelShape, mesh: Mesh, node: Node) -> str:
    for count, what in (
        (shape.num_kv_heads, "kv heads"),
        (shape.num_heads, "heads"),
        (shape.vocab, "vocabulary"),
    ):
        if count % mesh.tp:
            return f"tp{mesh.tp} does not divide {count} {what}"
    if shape.mlp_width % mesh.tp:
        return f"tp{mesh.tp} does not divide the MLP width {shape.mlp_width}"
    if shape.num_layers % mesh.pp:
        return f"pp{mesh.pp} does not divide {shape.num_layers} layers"
    if node.op == "generate" and node.options["max_new_tokens"] >= shape.max_positions:
        wanted = node.options["max_new_tokens"]
        return f"a prompt and {wanted} new tokens do not fit into the model's {shape.max_positions} positions"
    if node.op == "generate" and mesh.pp > 1:
        return "generation has no pipeline parallelism"
    return ""


def _rows_reason(draft: Draft, node: Node, work: Workload, mesh: Mesh) -> str:
    whole = work.rows // work.samples if node.op == "generate" else work.rows
    if whole % mesh.dp:
        return f"dp{mesh.dp} does not divide {whole} rows"
    if work.rows_per_update % mesh.dp:
        return f"dp{mesh.dp} does not divide a minibatch of {work.rows_per_update} rows"
    if work.rows_per_update % (mesh.dp * work.group):
        groups = f"groups of {work.group}"
        return f"dp{mesh.dp} does not split a minibatch of {work.rows_per_update} rows into whole {groups}"
    held_out = draft.graph.evaluation
    if held_out and draft.evaluation_graph and held_out.rows < mesh.dp:
        return f"dp{mesh.dp} is more than the {held_out.rows} evaluation rows"
    return ""


def _micro_batches(node: Node, work: Workload, mesh: Mesh) -> list[int]:
    """Rows per pass of one replica: the whole share, and halves of it, in whole groups (the samples of a
    prompt, or what a loss sees together)."""
    share, unit = (work.rows_per_update or work.rows) // mesh.dp, max(work.samples, work.group)
    sizes = {max(unit, ceil(share / 2**i)) for i in range(share.bit_length())}
    return sorted({size - size % unit for size in sizes}, reverse=True)


def _nothing_fits(nodes: Sequence[Node], pins: Sequence[Pin], refusals: dict[str, str]) -> Diagnostic:
    reasons = "; ".join(f"{mesh}: {reason}" for mesh, reason in list(refusals.items())[:6])
    names = " and ".join(f"`{n.name}`" for n in nodes)
    together = "on one mesh, which they share since they train one model" if len(nodes) > 1 else "so"
    if pins:
        message = " ".join(f"--pin {p.text}" for p in pins) + f": {names} cannot run {together}"
        unequal = (
            "the pins disagree" if len(pins) > 1 else "its sizes do not multiply to its number of devices"
        )
        return Diagnostic("HF302", message, help=reasons or unequal)
    return Diagnostic("HF304", f"no layout of {names} is feasible", nodes[0].span, reasons)
