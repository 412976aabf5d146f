"""Values that go from one set of devices to another: both take part, and can do nothing else meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from hflow.compiler.planner.assignments import first_consumer, maker
from hflow.graph.ir import Graph, Node


@dataclass(frozen=True)
class CrossMeshValue:
    """Something that nodes with models make, `after` all of them, and that others need, `before` all of them;
    it lies where the first of `ends` runs and is read where the second does."""

    after: frozenset[str]
    before: frozenset[str]
    ends: tuple[str, str]


def cross_mesh_values(graph: Graph, nodes: Sequence[str]) -> tuple[CrossMeshValue, ...]:
    """What may cross in one step, outside of loops. Values that earlier steps have made are left out."""
    loops = {n.name for n in graph.nodes if n.op == "repeat"}
    dag, models, at = graph.dag(), frozenset(nodes), hosts(graph)
    found: dict[CrossMeshValue, None] = {}
    for reader, value in graph.edges():
        source = graph.node(value.source.node)
        if value.lag or loops & {source.name, source.region, reader.name, reader.region}:
            continue
        after = models & {source.name, *nx.ancestors(dag, source.name)}  # pyright: ignore[reportUnknownMemberType]
        before = models & {reader.name, *nx.descendants(dag, reader.name)}  # pyright: ignore[reportUnknownMemberType]
        lies, read = at.get(source.name), at.get(reader.name)
        if lies and read and lies != read and after and before:
            found[CrossMeshValue(after, before, (lies, read))] = None
    return tuple(found)


@dataclass(frozen=True)
class CrossMeshTransfer:
    """A crossing between disjoint sets of devices: all `devices` take part."""

    after: frozenset[str]
    before: frozenset[str]
    devices: frozenset[int]

    def covers(self, other: CrossMeshTransfer) -> bool:
        """Whether it waits for all that `other` does, and the same holds for what waits and for devices."""
        return self.after >= other.after and self.before >= other.before and self.devices >= other.devices


def cross_mesh_transfers(
    found: Iterable[CrossMeshValue], among: Collection[str], places: Mapping[str, tuple[int, ...]]
) -> list[CrossMeshTransfer]:
    """Where nodes `among` some wait for each other's devices, without those that others say as much as."""
    kept: list[CrossMeshTransfer] = []
    for each in found:
        lies, read = (frozenset(places[name]) for name in each.ends)
        one = CrossMeshTransfer(each.after.intersection(among), each.before.intersection(among), lies | read)
        real = lies and read and lies.isdisjoint(read) and one.after and one.before
        if real and not any(other.covers(one) for other in kept):
            kept = [other for other in kept if not one.covers(other)] + [one]
    return kept


def hosts(graph: Graph) -> Mapping[str, str]:
    """The node with a model on whose devices each node runs, where there is one."""
    at = {n.name: n.name for n in graph.nodes if n.model}
    for node in (n for n in graph.nodes if not n.model and n.op != "repeat"):
        host = _host(graph, node, at)
        if host:
            at[node.name] = host
    return at


def _host(graph: Graph, node: Node, at: Mapping[str, str]) -> str | None:
    makers = [maker(graph, value) for value in node.inputs if not value.lag]
    return at.get(makers[0]) if makers else first_consumer(graph, node, at)
