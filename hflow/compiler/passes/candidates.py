"""For every node with a model: the parallel plans worth considering, fastest first.

A plan is kept if all sizes divide (heads, layers, vocabulary, rows) and its micro-batch fits. Nodes
without a model have no candidates: they run where their values lie (`place`).
"""

from __future__ import annotations

from collections.abc import Iterator
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
from hflow.graph.graph import Node


def candidates(draft: Draft) -> Draft:
    """Raises HF304 (or HF302 for a pinned node) with the reason of every layout that was refused."""
    found: dict[str, tuple[Candidate, ...]] = {}
    errors: list[Diagnostic] = []
    for node in (n for n in draft.graph.nodes if n.model):
        pin = next((p for p in draft.pins if p.node == node.name), None)
        options, refusals = _options(draft, node, pin)
        if not options:
            errors.append(_nothing_fits(node, pin, refusals))
        found[node.name] = tuple(sorted(options, key=lambda c: (c.time_s, c.working_bytes)))
    if not found:
        message = f"no node of `{draft.graph.name}` uses a model, so there is nothing to place"
        errors.append(Diagnostic("HF304", message, help="add a generate, score or train node"))
    if errors:
        raise HflowError(errors)
    return replace(draft, candidates=found)


def _options(draft: Draft, node: Node, pin: Pin | None) -> tuple[list[Candidate], dict[str, str]]:
    options: list[Candidate] = []
    refusals: dict[str, str] = {}
    for mesh in _meshes(draft, pin):
        if options and not pin and len(mesh.devices) < len(options[0].devices):
            break  # fewer devices only when nothing runs on more
        result = _candidate(draft, node, mesh)
        if isinstance(result, Candidate):
            options.append(result)
        else:
            refusals[str(mesh)] = result
    return options, refusals


def _meshes(draft: Draft, pin: Pin | None) -> Iterator[Mesh]:
    """Meshes to try, on as many devices as possible first."""
    sizes = dict(pin.sizes) if pin else {}
    everything = pin.devices if pin and pin.devices else draft.cluster.devices
    counts = [len(everything)] if pin and pin.devices else range(len(everything), 0, -1)
    for count in counts:
        for pp, tp in ((p, t) for p in _divisors(count) for t in _divisors(count // p)):
            mesh = Mesh.of(everything[:count], pp=pp, dp=count // (pp * tp), tp=tp)
            if all(mesh.size(axis) == size for axis, size in sizes.items() if axis in AXES):
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
    if shape.ffn % mesh.tp:
        return f"tp{mesh.tp} does not divide the MLP width {shape.ffn}"
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
    if work.rows_per_update and work.rows_per_update % mesh.dp:
        return f"dp{mesh.dp} does not divide a minibatch of {work.rows_per_update} rows"
    held_out = draft.graph.evaluation
    if held_out and draft.evaluation_graph and held_out.rows < mesh.dp:
        return f"dp{mesh.dp} is more than the {held_out.rows} evaluation rows"
    return ""


def _micro_batches(node: Node, work: Workload, mesh: Mesh) -> list[int]:
    """Rows per pass of one replica: the whole share, and halves of it down to one prompt's samples."""
    share = (work.rows_per_update or work.rows) // mesh.dp
    sizes = {max(work.samples, ceil(share / 2**i)) for i in range(share.bit_length())}
    if node.op == "generate":
        sizes = {size - size % work.samples for size in sizes}
    return sorted(sizes, reverse=True)


def _nothing_fits(node: Node, pin: Pin | None, refusals: dict[str, str]) -> Diagnostic:
    reasons = "; ".join(f"{mesh}: {reason}" for mesh, reason in list(refusals.items())[:6])
    if pin:
        message = f"--pin {pin.text}: `{node.name}` cannot run so"
        return Diagnostic(
            "HF302", message, help=reasons or "its sizes do not multiply to its number of devices"
        )
    return Diagnostic("HF304", f"no layout of `{node.name}` is feasible", node.span, reasons)
