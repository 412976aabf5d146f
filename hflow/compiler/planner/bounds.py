"""What no schedule can beat: lower bounds of a step's time, from the times of its nodes alone.

1. A set of devices does everything that is put on it once per step.
2. It does all of one step before the next (`timeline`). So where a node and one that follows from it share
   devices, what lies on the paths between them is done within a step: the longest path, and for every set of
   devices its part of that work, between the earliest start and the latest end of it (one-machine bound).
3. A reader of a trained model waits for the training of the step before (of `lag` steps more): so do the
   paths from the reader to the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import networkx as nx

from hflow.compiler.draft import Draft
from hflow.compiler.planner.step import PYTHON_CALL_S
from hflow.compiler.workload import rounds

Places = Mapping[str, tuple[int, ...]]  # resources by node
Seconds = Mapping[str, float]
Before = tuple[tuple[str, float], ...]  # predecessors, with the least time between
Job = tuple[float, float, float]  # its earliest start, its time, the least time that follows it


@dataclass(frozen=True)
class Reach:
    """What follows from `first`, itself included, in topological order with predecessors."""

    first: str
    nodes: tuple[tuple[str, Before], ...]


class Bounds:
    """The bounds of one graph."""

    def __init__(self, draft: Draft):
        graph = draft.graph
        self.nodes = tuple(n.name for n in graph.nodes if n.model)
        self.rounds = {name: rounds(graph, graph.node(name)) for name in self.nodes}
        edges = [e for e in draft.weight_edges if not e.every]
        self.trainer_of = {e.reader: e.trainer for e in edges}
        self.lags = {(e.reader, e.trainer): e.lag for e in edges}
        dag = _of_models(graph.dag(), self.nodes)
        self.reaches = tuple(_reach(dag, name) for name in self.nodes)
        ends = [n for n in self.nodes if not dag.out_degree(n)]
        starts = [n for n in self.nodes if not dag.in_degree(n)]
        self.spans = tuple(span for b in starts for a in ends for span in _between(dag, b, a))

    def step_s(self, times: Seconds, places: Places, moves: Seconds, enough_s: float = float("inf")) -> float:
        """The best of the bounds, or the first that reaches `enough_s`.

        Args:
            times: of one run of each node. moves: of the weights to each reader, as far as they are known.
        """
        best = 0.0
        for bound in self._bounds(times, places, moves):
            best = max(best, bound)
            if best >= enough_s:
                break
        return best

    def _bounds(self, times: Seconds, places: Places, moves: Seconds) -> Iterator[float]:
        yield self._busiest_s(times, places, moves)
        for reach in self.reaches:
            yield self._longest_s(reach, times, places, moves)
        for span in self.spans:
            yield self._machines_s(span, times, places, moves)

    def _busiest_s(self, times: Seconds, places: Places, moves: Seconds) -> float:
        busy: dict[int, float] = {}
        for name in self.nodes:
            seconds = times[name] * self.rounds[name]
            for resource in places[name]:
                busy[resource] = busy.get(resource, 0.0) + seconds
        for reader, seconds in moves.items():
            for resource in {*places[reader], *places[self.trainer_of[reader]]}:
                busy[resource] += seconds
        return max(busy.values(), default=0.0)

    def _longest_s(self, reach: Reach, times: Seconds, places: Places, moves: Seconds) -> float:
        """Over all nodes that follow from the first and have to end before its next run."""
        first = reach.first
        moved, wide = self._moved(first, places, moves)
        heads = {first: moved}
        longest = moved + times[first]
        for name, before in reach.nodes[1:]:
            head = heads[name] = max(heads[b] + times[b] + gap for b, gap in before)
            lag = self.lags.get((first, name))
            if lag is not None or not wide.isdisjoint(places[name]):
                longest = max(longest, (head + times[name]) / (1 + (lag or 0)))
        return longest

    def _moved(self, first: str, places: Places, moves: Seconds) -> tuple[float, set[int]]:
        """Seconds that weights move before a node runs, and the devices that take part."""
        trainer = self.trainer_of.get(first)
        if trainer is None or first not in moves or self.lags[first, trainer]:
            return 0.0, set(places[first])
        return moves[first], {*places[first], *places[trainer]}

    def _machines_s(self, span: Reach, times: Seconds, places: Places, moves: Seconds) -> float:
        last = span.nodes[-1][0]
        moved, wide = self._moved(span.first, places, moves)
        if wide.isdisjoint(places[last]):
            return 0.0
        heads, tails = {span.first: moved}, dict.fromkeys((name for name, _ in span.nodes), 0.0)
        for name, before in span.nodes[1:]:
            heads[name] = max(heads[b] + times[b] + gap for b, gap in before)
        for name, before in reversed(span.nodes):
            for b, gap in before:
                tails[b] = max(tails[b], tails[name] + times[name] + gap)
        work: dict[int, list[Job]] = {}
        for name, _ in span.nodes:
            job = heads[name], times[name] * self.rounds[name], tails[name]
            for resource in places[name]:
                work.setdefault(resource, []).append(job)
        for reader, seconds in moves.items():  # at any time before the reader, within the step
            if reader in tails:
                job = 0.0, seconds, tails[reader] + times[reader]
                for resource in wide.intersection(places[last], places[reader]):
                    work[resource].append(job)
        return max(map(_machine_s, work.values()), default=0.0)


def _machine_s(jobs: list[Job]) -> float:
    """For every set of jobs that arrive after some time: that, their work, and the least that follows."""
    best = total = 0.0
    tail = float("inf")
    for head, work, after in sorted(jobs, reverse=True):
        total += work
        tail = min(tail, after)
        best = max(best, head + total + tail)
    return best


def _of_models(graph: nx.DiGraph[str], nodes: tuple[str, ...]) -> nx.DiGraph[str]:
    """The paths between nodes with models; `gap`: the least time of the nodes without one in between."""
    out: nx.DiGraph[str] = nx.DiGraph()
    out.add_nodes_from(nodes)
    for last in nodes:
        for first, between in _nearest(graph, last, frozenset(nodes)).items():
            out.add_edge(first, last, gap=between * PYTHON_CALL_S)
    return out


def _nearest(graph: nx.DiGraph[str], node: str, models: frozenset[str]) -> dict[str, int]:
    """The nodes with models before `node`, with the most others in between on a path without such a node."""
    found: dict[str, int] = {}
    for before in graph.predecessors(node):
        nearest = {before: 0} if before in models else _nearest(graph, before, models)
        for name, between in nearest.items():
            found[name] = max(found.get(name, 0), between + (before not in models))
    return found


def _reach(dag: nx.DiGraph[str], first: str) -> Reach:
    inside: set[str] = {first, *nx.descendants(dag, first)}
    return Reach(first, _in_order(dag, inside))


def _between(dag: nx.DiGraph[str], first: str, last: str) -> list[Reach]:
    inside: set[str] = {first, *nx.descendants(dag, first)} & {last, *nx.ancestors(dag, last)}
    return [Reach(first, _in_order(dag, inside))] if last in inside and first != last else []


def _in_order(dag: nx.DiGraph[str], inside: set[str]) -> tuple[tuple[str, Before], ...]:
    gaps: dict[tuple[str, str], float] = nx.get_edge_attributes(dag, "gap")
    return tuple(
        (name, tuple((b, gaps[b, name]) for b in dag.predecessors(name) if b in inside))
        for name in nx.lexicographical_topological_sort(dag.subgraph(inside))
    )
