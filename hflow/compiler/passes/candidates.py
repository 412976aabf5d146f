"""For every unit of nodes: on which numbers of devices, in which layouts, and how it can run there.

A layout is kept if all its sizes divide (heads, layers, vocabulary, rows) and some way to run fits into a
device's memory. Of the ways of one node in one layout (micro-batch, recomputation) those are kept that no
other beats in both time and memory; layouts are all kept, because what moves between nodes depends on them.
Nodes without a model have no candidates: they run where their values lie (`place`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hflow.compiler.cluster import Cluster
from hflow.compiler.draft import Draft
from hflow.compiler.layout import Mesh
from hflow.compiler.pins import Pin
from hflow.compiler.planner.pricing import Pricing
from hflow.compiler.planner.unit import Option, Options, Unit, units
from hflow.compiler.shape import ModelShape
from hflow.compiler.workload import Workload, workload
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.graph import Node


def candidates(draft: Draft) -> Draft:
    """Raises HF304 (or HF302 for pinned nodes) with the reasons why no layout of a unit is possible."""
    found: dict[str, Options] = {}
    errors: list[Diagnostic] = []
    for unit in units(draft.graph):
        found[unit.name] = _options(draft, unit)
        if not found[unit.name]:
            errors.append(_nothing_fits(draft, unit))
    if not found:
        message = f"no node of `{draft.graph.name}` uses a model, so there is nothing to place"
        errors.append(Diagnostic("HF304", message, help="add a generate, score or train node"))
    if errors:
        raise HflowError(errors)
    return replace(draft, candidates=found)


def sizes(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of devices that a group of models may have: divisors of a host's, and whole hosts."""
    per_host = cluster.devices_per_host
    return *_divisors(per_host), *range(2 * per_host, cluster.num_devices + 1, per_host)


def _options(draft: Draft, unit: Unit) -> Options:
    """By number of devices, the fastest first."""
    model, works = draft.graph.model(unit.model), tuple(map(workload, unit.nodes))
    pins = _pins(draft, unit)
    pricing = Pricing(unit, model, draft.shapes[unit.model], works, pins, draft.cluster)
    found: dict[int, list[Option]] = defaultdict(list)
    for mesh in _meshes(draft, unit, pins):
        if not _reason(draft, unit, mesh):
            found[len(mesh.devices)] += pricing.options(mesh)
    return {n: tuple(sorted(found[n], key=_speed)) for n in sorted(found) if found[n]}


def _speed(option: Option) -> tuple[float, int]:
    return option.least_s, option.idle_bytes + option.least_bytes


def _pins(draft: Draft, unit: Unit) -> tuple[Pin, ...]:
    names = {node.name for node in unit.nodes}
    return tuple(p for p in draft.pins if p.node in names)


def _meshes(draft: Draft, unit: Unit, pins: Sequence[Pin]) -> Iterator[Mesh]:
    """Meshes to try that all pins admit: tp inside a host, pp at most the layers."""
    cluster, shape = draft.cluster, draft.shapes[unit.model]
    wanted = {axis: size for pin in pins for axis, size in pin.sizes}
    if any(wanted[axis] != size for pin in pins for axis, size in pin.sizes):
        return
    pinned = {len(pin.devices) for pin in pins if pin.devices}
    counts = pinned or sizes(cluster)
    if wanted and not pinned:
        counts = sorted({*sizes(cluster), *range(1, cluster.devices_per_host + 1)})
    pps = {wanted["pp"]} if "pp" in wanted else _divisors(shape.num_layers)
    for count in counts if len(pinned) < 2 else ():
        tps = {wanted["tp"]} if "tp" in wanted else _divisors(min(count, cluster.devices_per_host))
        for pp, tp in ((p, t) for p in pps for t in tps if count % (p * t) == 0):
            dp = count // (pp * tp)
            if wanted.get("dp", dp) == dp:
                yield Mesh.of(tuple(range(count)), pp=pp, dp=dp, tp=tp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _reason(draft: Draft, unit: Unit, mesh: Mesh) -> str:
    """Why `mesh` is no choice, if it is none."""
    shape = draft.shapes[unit.model]
    for node, work in zip(unit.nodes, map(workload, unit.nodes)):
        reason = _model_reason(shape, mesh, node) or _rows_reason(draft, node, work, mesh)
        if reason:
            return reason
    return ""


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


def _nothing_fits(draft: Draft, unit: Unit) -> Diagnostic:
    pins = _pins(draft, unit)
    capacity = draft.cluster.device.usable_bytes / 1e9
    exceeded = f"the weights and the smallest micro-batch exceed {capacity:.3g} GB"
    refusals = [(mesh, _reason(draft, unit, mesh) or exceeded) for mesh in _meshes(draft, unit, pins)]
    last = refusals[-6:]  # of the most devices
    reasons = "; ".join(f"{mesh}: {reason}" for mesh, reason in last)
    names = " and ".join(f"`{n.name}`" for n in unit.nodes)
    together = "on one mesh, which they share since they use one model" if len(unit.nodes) > 1 else "so"
    if not pins:
        message = f"no layout of {names} is feasible"
        return Diagnostic("HF304", message, unit.nodes[0].span, reasons)
    message = " ".join(f"--pin {p.text}" for p in pins) + f": {names} cannot run {together}"
    unequal = "the pins disagree" if len(pins) > 1 else "its sizes do not multiply to its number of devices"
    return Diagnostic("HF302", message, help=reasons or unequal)
