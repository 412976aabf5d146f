"""The layouts of a node group: the meshes that its model, its rows and its pins admit, and why others are
none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.candidates.pricing import Pricing
from hflow.compiler.candidates.row_splits import context_sizes, uncut
from hflow.compiler.pins import Pin
from hflow.compiler.state import Draft
from hflow.graph.ir import Node, evaluation_of, step_node
from hflow.plan.cluster import Cluster
from hflow.plan.engine_profile import EngineProfile
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import layout_text
from hflow.plan.pipeline_stages import stage_sizes
from hflow.plan.ports import generates_evenly, row_unit
from hflow.plan.workload import Workload


def candidates_of(draft: Draft, group: NodeGroup, counts: Sequence[int] = ()) -> Candidates:
    """The candidates that fit into a device's memory, by number of devices, the fastest first. Where no
    device holds its share of a model that generates with tp inside a host, those with tp over several.

    Args:
        counts: see `meshes`.
    """
    inside = _priced(draft, group, meshes(draft, group, counts))
    fits = any(_fits_alone(draft, candidate) for candidate in chain(*inside.values()))
    if _generates_over_hosts(draft, group) and not fits:
        return _priced(draft, group, meshes_over_hosts(draft, group, counts)) or inside
    return inside


def _fits_alone(draft: Draft, candidate: Candidate) -> bool:
    """With its weights, if nothing else were on its devices."""
    return _least_bytes(candidate) <= draft.cluster.device.usable_bytes


def _least_bytes(candidate: Candidate) -> int:
    return candidate.idle_bytes + candidate.kept.copy_bytes + candidate.least_bytes


def _generates_over_hosts(draft: Draft, group: NodeGroup) -> bool:
    """Whether tp may fill several hosts: for generation, which has no pipeline stages to share a model; not
    where pins say tp, or other nodes use the mesh, too."""
    pinned = any("tp" in dict(pin.sizes) for pin in pins_of(draft, group))
    return not (pinned or draft.cluster.more) and all(node.op == "generate" for node in group.nodes)


def _priced(draft: Draft, group: NodeGroup, meshes: Iterable[Mesh]) -> Candidates:
    pricing = _pricing(draft, group)
    found: dict[int, list[Candidate]] = defaultdict(list)
    for mesh in meshes:
        if not refusal(draft, group, mesh):
            found[len(mesh.devices)] += pricing.candidates(mesh)
    return {n: tuple(sorted(found[n], key=_speed)) for n in sorted(found) if found[n]}


def pins_of(draft: Draft, group: NodeGroup) -> tuple[Pin, ...]:
    names = {node.name for node in group.nodes}
    return tuple(p for p in draft.pins if p.node in names)


def meshes(draft: Draft, group: NodeGroup, counts: Sequence[int] = ()) -> Iterator[Mesh]:
    """Meshes to try that all pins admit: tp inside a host, pp at most the layers.

    Args:
        counts: numbers of devices; where there are none those that are pinned, or `sizes` of the cluster.
    """
    per_host = draft.cluster.devices_per_host
    return _meshes(draft, group, counts, lambda count: _divisors(min(count, per_host)))


def meshes_over_hosts(draft: Draft, group: NodeGroup, counts: Sequence[int] = ()) -> Iterator[Mesh]:
    """As `meshes`, but tp fills several hosts."""
    per_host = draft.cluster.devices_per_host
    spans = range(2 * per_host, draft.cluster.num_devices + 1, per_host)
    return _meshes(draft, group, counts, lambda count: [tp for tp in spans if count % tp == 0])


def _meshes(
    draft: Draft, group: NodeGroup, counts: Sequence[int], tps_of: Callable[[int], list[int]]
) -> Iterator[Mesh]:
    """`tps_of`: the sizes of tp to try on so many devices."""
    cluster, shape, pins = draft.cluster, draft.shapes[group.model], pins_of(draft, group)
    wanted = {axis: size for pin in pins for axis, size in pin.sizes}
    if any(wanted[axis] != size for pin in pins for axis, size in pin.sizes):
        return
    pinned = {pin.devices for pin in pins if pin.devices}
    if wanted and not pinned and not counts:
        counts = sorted({*sizes(cluster), *range(1, cluster.devices_per_host + 1)})
    counts = counts or sorted(map(len, pinned)) or sizes(cluster)
    pps = {wanted["pp"]} if "pp" in wanted else _numbers_of_stages(shape.num_layers)
    for count in counts if len(pinned) < 2 else ():
        tps = {wanted["tp"]} if "tp" in wanted else tps_of(count)
        cps = context_sizes(group, pins, count)
        for pp, tp, cp in ((p, t, c) for p in pps for t in tps for c in cps if count % (p * t * c) == 0):
            dp = count // (pp * tp * cp)
            if wanted.get("dp", dp) == dp:
                yield Mesh.of(tuple(range(count)), pp=pp, dp=dp, cp=cp, tp=tp)


def sizes(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of devices that a group of models may have: divisors of a host's, and whole hosts."""
    per_host = cluster.devices_per_host
    return *_divisors(per_host), *range(2 * per_host, cluster.num_devices + 1, per_host)


def refusal(draft: Draft, group: NodeGroup, mesh: Mesh) -> str:
    """Why `mesh` is no choice, whatever the memory; empty if it is one."""
    shape = draft.shapes[group.model]
    for node, work in zip(group.nodes, group.works):
        reason = _model_refusal(shape, mesh, node, group.profile) or _rows_refusal(draft, node, work, mesh)
        if reason:
            return reason
    if mesh.cp > 1 and (reason := uncut(group)):
        return f"{reason}: no cp{mesh.cp}"
    if mesh.pp > 1 and group.shares_forward:
        return "a shared forward pass has no pipeline stages"
    return _pricing(draft, group).refusal(mesh) if draft.pins else ""


def needed_bytes(draft: Draft, group: NodeGroup, mesh: Mesh) -> int:
    """What the node group needs on a device of `mesh`, run with the least memory and nothing else beside
    it."""
    candidates = _pricing(unlimited(draft), group).candidates(mesh)
    return min(map(_least_bytes, candidates))


def candidate_text(candidate: Candidate) -> str:
    """``pp2 tp4 zero1 offload``; ``dp1`` on one device."""
    return layout_text(candidate.mesh(0), candidate.strategy, candidate.offload) or "dp1"


def bytes_text(size: int) -> str:
    """``84.9 GB``, ``66.7 MB``."""
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"


def of_text(size: int, limit: int) -> str:
    """``84.9 of 72.0 GB``."""
    most = bytes_text(limit)
    return f"{bytes_text(size).removesuffix(most[-3:])} of {most}"


def unlimited(draft: Draft) -> Draft:
    """The same on devices whose memory holds everything."""
    device = replace(draft.cluster.device, memory_bytes=2**62, reserve_bytes=0)
    return replace(draft, cluster=replace(draft.cluster, device=device))


def _pricing(draft: Draft, group: NodeGroup) -> Pricing:
    model = draft.graph.model(group.model)
    return Pricing(group, model, draft.shapes[group.model], pins_of(draft, group), draft.cluster)


def _speed(candidate: Candidate) -> tuple[float, int]:
    return candidate.least_s, candidate.idle_bytes + candidate.least_bytes


def _numbers_of_stages(num_layers: int) -> list[int]:
    return [pp for pp in range(1, num_layers + 1) if stage_sizes(num_layers, pp)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _model_refusal(shape: ModelShape, mesh: Mesh, node: Node, engine: EngineProfile) -> str:
    if mesh.pp > 1 and node.op not in engine.pipelines:
        return "generation has no pipeline parallelism"
    if mesh.tp > 1 and not engine.tensor_parallel:
        return f"{engine.title} does not split a model over tp{mesh.tp}"
    if shape.num_kv_heads % mesh.tp and mesh.tp % shape.num_kv_heads:
        return f"tp{mesh.tp} neither divides {shape.num_kv_heads} kv heads nor is a multiple of them"
    for count, what in ((shape.num_heads, "heads"), (shape.vocab, "vocabulary")):
        if count % mesh.tp:
            return f"tp{mesh.tp} does not divide {count} {what}"
    if mesh.tp > 1 and shape.vocab % engine.vocab_unit:
        no_multiple = f"the {shape.vocab} tokens are no multiple of {engine.vocab_unit}"
        return f"{engine.title} does not split the vocabulary over tp{mesh.tp}: {no_multiple}"
    if shape.mlp_width % mesh.tp:
        return f"tp{mesh.tp} does not divide the MLP width {shape.mlp_width}"
    if not stage_sizes(shape.num_layers, mesh.pp):
        return f"pp{mesh.pp} would leave stages without any of {shape.num_layers} layers"
    return ""


def _rows_refusal(draft: Draft, node: Node, work: Workload, mesh: Mesh) -> str:
    if name := evaluation_of(node.name):
        return _evaluation_refusal(draft, mesh, name)
    if uneven := _uneven(node, work, mesh):
        return uneven
    if work.rows_per_update % mesh.dp:
        return f"dp{mesh.dp} does not divide a minibatch of {work.rows_per_update} rows"
    if work.rows_per_update % (mesh.dp * work.group):
        groups = f"groups of {work.group}"
        return f"dp{mesh.dp} does not split a minibatch of {work.rows_per_update} rows into whole {groups}"
    held_out = draft.graph.evaluation
    if held_out and draft.evaluation_graph and held_out.rows < mesh.dp:
        return f"dp{mesh.dp} is more than the {held_out.rows} evaluation rows"
    apart = {pin.node for pin in draft.pins if pin.devices or dict(pin.sizes).get("dp")}
    alike = (
        named.name
        for named in draft.graph.evaluations
        for own in named.nodes
        if step_node(own.name) == node.name and own.name not in apart
    )
    return next(filter(None, (_evaluation_refusal(draft, mesh, name) for name in alike)), "")


def _uneven(node: Node, work: Workload, mesh: Mesh) -> str:
    """Why replicas would not have equally many rows; empty if they would."""
    together = row_unit(node.type_of("tokens"))
    whole = work.rows // together
    if whole % mesh.dp == 0 or (node.op == "generate" and generates_evenly(node, mesh.dp)):
        return ""
    if together == 1:
        return f"dp{mesh.dp} does not divide {whole} rows"
    if node.op == "generate":
        return f"dp{mesh.dp} does not divide {whole} prompts, nor the {together} samples of each"
    return f"dp{mesh.dp} does not divide {whole} groups of {together} rows"


def _evaluation_refusal(draft: Draft, mesh: Mesh, name: str) -> str:
    """A rank without rows has nothing to pass through the model; beyond that their number need not divide."""
    named = next(each for each in draft.graph.evaluations if each.name == name)
    if named.rows >= mesh.dp:
        return ""
    return f"dp{mesh.dp} is more than the {named.rows} rows of evaluation `{name}`"
