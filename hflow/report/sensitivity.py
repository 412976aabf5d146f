"""Sensitivities of a plan: what its step would take if one thing were otherwise, compiled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.graph.scaled import with_batch, with_responses
from hflow.plan.cluster import Cluster, Link
from hflow.plan.plan import Plan
from hflow.view.terminal.diff import moved_nodes

Compiled = Callable[[Graph, Cluster], Plan]


@dataclass(frozen=True)
class Variation:
    """One thing that is otherwise. `work`: how many times the samples of today's step its steps have."""

    name: str
    cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster
    graph: Callable[[Graph], Graph] = lambda graph: graph
    work: int = 1


@dataclass(frozen=True)
class Sensitivity:
    """What a variation comes to: its plan's step time, and `change`, the part by which a sample takes more
    time than today, negative where less. `gap` as in `hflow.plan.plan.Search`. `moved`: the nodes that have
    other layouts or devices than today."""

    variation: Variation
    step_time_s: float
    change: float
    gap: float | None
    moved: tuple[str, ...]


@dataclass(frozen=True)
class NoSensitivity:
    """A variation without a plan, and why."""

    variation: Variation
    reason: Diagnostic


SensitivityRow = Sensitivity | NoSensitivity


def variations(graph: Graph, cluster: Cluster) -> tuple[Variation, ...]:
    """Those that are about something that there is: links between hosts where hosts are several, and so
    on."""
    return tuple(_variations(graph, cluster))


def _variations(graph: Graph, cluster: Cluster) -> Iterator[Variation]:
    if cluster.devices_per_host > 1:
        yield Variation("links inside hosts x2", lambda c: replace(c, intra_host=_faster(c.intra_host)))
    if cluster.hosts > 1:
        yield Variation("links between hosts x2", lambda c: replace(c, inter_host=_faster(c.inter_host)))
    yield Variation("device FLOP/s x2", lambda c: _with_device(c, flops=2 * c.device.flops))
    yield Variation("memory bandwidth x2", _with_faster_memory)
    yield Variation("device memory x2", _with_more_memory)
    yield Variation("one more host", lambda c: replace(c, hosts=c.hosts + 1))
    if cluster.hosts > 1:
        yield Variation("one host less", lambda c: replace(c, hosts=c.hosts - 1))
    if any(node.op == "generate" for node in graph.nodes):
        yield Variation("responses half as long", graph=lambda g: with_responses(g, 0.5))
    if any(node.op == "data" for node in graph.nodes):
        yield Variation("batch x2, change per sample", graph=lambda g: with_batch(g, 2), work=2)


def _faster(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)


def _with_faster_memory(cluster: Cluster) -> Cluster:
    return _with_device(cluster, memory_bandwidth=2 * cluster.device.memory_bandwidth)


def _with_more_memory(cluster: Cluster) -> Cluster:
    """What is held back is a part of a device's memory, and so twice as much."""
    device = cluster.device
    doubled = {"memory_bytes": 2 * device.memory_bytes, "reserve_bytes": 2 * device.reserve_bytes}
    return _with_device(cluster, **doubled)


def _with_device(cluster: Cluster, **changed: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **changed))


def sensitivity(plan: Plan, graph: Graph, variation: Variation, compiled: Compiled) -> SensitivityRow:
    """What `variation` of a graph and of the cluster of its `plan` comes to, or why there is no plan.

    Args:
        compiled: makes a plan as `plan` was made.
    """
    try:
        new = compiled(variation.graph(graph), variation.cluster(plan.cluster))
    except HflowError as error:
        return NoSensitivity(variation, error.diagnostics[0])
    change = new.step_time_s / (variation.work * plan.step_time_s) - 1 if plan.step_time_s else 0.0
    return Sensitivity(variation, new.step_time_s, change, new.search.gap, moved_nodes(plan, new))
