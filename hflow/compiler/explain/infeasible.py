"""What to say when no plan fits: what is missing, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hflow.compiler.candidates.meshes import bytes_text, candidate_text, candidates_of, unlimited
from hflow.compiler.candidates.node_groups import node_groups
from hflow.compiler.candidates.shared_bases import alike
from hflow.compiler.explain.min_memory import DeviceLoad, GroupMemory, MinMemoryPlan, min_memory
from hflow.compiler.options import DEFAULTS, PlannerOptions
from hflow.compiler.planner.indivisible import indivisible
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.state import Draft
from hflow.cost.residency import LabelledBytes
from hflow.diagnostics import Diagnostic
from hflow.graph.ir import Node
from hflow.plan.cluster import Cluster, Link

MOST_TIMES = 64  # as many hosts as there are, at most, are looked at
SLOW = Link(1.0, 0.0)  # to the host's memory: whether it helps at all


def infeasible(draft: Draft, tries_more: str = "") -> Diagnostic:
    """HF305: no plan of `draft` fits into the memory of its cluster; HF309: its placement admits none.

    Args:
        tries_more: what tries more plans, where the search has not tried all.
    """
    cluster, graph = draft.cluster, draft.graph
    undivided = indivisible(SearchSpace(draft))
    if undivided:
        return undivided
    free = replace(draft, pins=(), options=DEFAULTS, sharing={})
    lean = _least_memory(free)
    usable = cluster.device.usable_bytes
    where = f"{cluster.num_devices} {cluster.device.name} with {bytes_text(usable)} each"
    none = f"no plan of `{graph.name}` fits"
    if tries_more:
        none = f"found no plan of `{graph.name}` that fits"
    message = f"{none} into the memory of `{cluster.name}`: {where}"
    restrictions = " ".join(dict.fromkeys(_restrictions(draft)))
    if restrictions and lean.fullest.peak_bytes <= usable:
        return Diagnostic("HF305", message, help=f"without {restrictions} there are plans that fit")
    full = lean.fullest
    helps = ";\n".join((*_untried(tries_more), _needs(full), *_remedies(free, full), _smallest(free)))
    return Diagnostic("HF305", message, _hungriest(full.neediest).span, helps)


def _least_memory(draft: Draft) -> MinMemoryPlan:
    return _of_all(_whatever_memory(draft))


def _whatever_memory(draft: Draft) -> Draft:
    """With all candidates, however much they need."""
    wide = unlimited(draft)
    groups = node_groups(wide.graph, wide.engines, wide.evaluation_graph, wide.sharing)
    found = {group.name: candidates_of(wide, group) for group in groups}
    return replace(wide, candidates=alike(wide.graph, groups, found))


def _of_all(wide: Draft) -> MinMemoryPlan:
    lean = min_memory(SearchSpace(wide))
    assert lean, "all models on all devices are always a plan"
    return lean


def _fits(draft: Draft) -> bool:
    """Whether some plan fits; most often one with all models on all devices, which is found faster."""
    wide = _whatever_memory(draft)
    colocated = replace(wide, options=PlannerOptions("colocate"))
    peaks = (_of_all(each).fullest.peak_bytes for each in (colocated, wide))
    return any(peak <= draft.cluster.device.usable_bytes for peak in peaks)


def _restrictions(draft: Draft) -> Iterator[str]:
    yield from (f"--pin {pin.text}" for pin in draft.pins)
    if draft.options.placement != DEFAULTS.placement:
        yield f"--placement {draft.options.placement}"
    if draft.options.planner != DEFAULTS.planner:
        yield f"--planner {draft.options.planner}"


def _hungriest(held: GroupMemory) -> Node:
    """The node of a node group that needs most."""
    needs = [front.least_bytes for front in held.candidate.fronts]
    return held.group.nodes[needs.index(max(needs))]


def _untried(tries_more: str) -> Iterator[str]:
    if tries_more:
        yield (
            "plans with the nodes of a model in several places may need less, and not all were tried:\n"
            f"{tries_more}"
        )


def _needs(load: DeviceLoad) -> str:
    node = _hungriest(load.neediest)
    sizes = sorted(_parts(load), key=lambda part: -part[1])
    parts = "\n+ ".join(f"{label} {bytes_text(size)}" for label, size in sizes if size)
    peak = bytes_text(load.peak_bytes)
    return f"with each model in one place, some device needs {peak} while `{node.name}` runs:\n  {parts}"


def _parts(load: DeviceLoad) -> Iterator[tuple[str, int]]:
    """What lies on a device when it is fullest."""
    needy = load.neediest
    working = needy.candidate.least_bytes - needy.candidate.kept.swapped_bytes
    yield f"{_hungriest(needy).name} working set", working
    for held in load.held:
        kept, runs = held.candidate.kept, held is needy
        size = held.idle_bytes + (kept.swapped_bytes + held.copy.passing if runs else 0)
        there = LabelledBytes((kept.in_use if runs else kept.always).label, size)
        if held.group.role == "train" and held.group.model == needy.group.model:
            there = kept.without(there, min(needy.copy.donated, working))
        yield f"{held.group.model} {there.label} ({candidate_text(held.candidate)})", there.size


def _remedies(draft: Draft, load: DeviceLoad) -> Iterator[str]:
    """What would help beside more devices."""
    cluster, most = draft.cluster, load.neediest.candidate
    if most.least_bytes - most.kept.swapped_bytes > cluster.device.usable_bytes / 2:
        yield "micro-batches are as small as can be, so that only shorter sequences need less"
    if cluster.host_link is None and _fits(replace(draft, cluster=replace(cluster, host_link=SLOW))):
        yield "it fits if models may wait in the host's memory, for which the cluster file lacks `links.host`"


def _smallest(draft: Draft) -> str:
    """The smallest cluster of the same kind on which a plan fits that has each model in one place; all
    that fits on few hosts does on more."""
    hosts = draft.cluster.hosts
    few, many = hosts, 2 * hosts
    while not _fits(replace(draft, cluster=_with(draft.cluster, many))):
        if many >= MOST_TIMES * hosts:
            return f"nor does such a plan fit on {many * draft.cluster.devices_per_host:,} of these devices"
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        if _fits(replace(draft, cluster=_with(draft.cluster, middle))):
            many = middle
        else:
            few = middle
    per_host, name = draft.cluster.devices_per_host, draft.cluster.device.name
    return f"it fits on {many * per_host} devices ({many} hosts of {per_host} {name})"


def _with(cluster: Cluster, hosts: int) -> Cluster:
    return replace(cluster, hosts=hosts)
