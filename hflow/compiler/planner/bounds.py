"""What no schedule can beat: lower bounds of a step's time, from the times of its nodes alone.

1. A set of devices does everything that is put on it once per step.
2. It does all of one step before the next (`timeline`), and a reader of a trained model waits for the
   training of the step before. So nodes that share devices with a node, or train what it reads, end before
   its next run: they *close* the ring that begins with it. What lies between is done within a step: the
   longest path to a closing node; and for every set of devices its part of that work, between the earliest
   start of it and the least time from its end to a closing node (one-machine bound).
3. With weights of `lag` steps more, a ring takes so many steps more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from hflow.compiler.draft import Draft
from hflow.compiler.planner.crossings import crossings, meetings
from hflow.compiler.planner.step import PYTHON_CALL_S
from hflow.compiler.planner.turns import Job, Jobs, jobs_of, machine_s, too_long
from hflow.compiler.workload import rounds

Places = Mapping[str, tuple[int, ...]]  # resources by node
Seconds = Mapping[str, float]
Before = tuple[tuple[str, float], ...]  # predecessors, with the least time between


@dataclass(frozen=True)
class Reach:
    """What follows from `first`, itself included, in topological order with predecessors among it."""

    first: str
    nodes: tuple[tuple[str, Before], ...]

    @cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """All that each node follows from."""
        found: dict[str, frozenset[str]] = {}
        for name, before in self.nodes:
            found[name] = frozenset().union(*({b} | found[b] for b, _ in before))
        return found

    @cached_property
    def after(self) -> dict[str, frozenset[str]]:
        """All that follows from each node."""
        return {name: frozenset(n for n in self.before if name in self.before[n]) for name in self.before}


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
        self.crossings = crossings(graph, self.nodes)
        self._jobs: dict[object, Jobs] = {}
        self.reaches = tuple(Reach(name, _in_order(dag, {name, *_after(dag, name)})) for name in self.nodes)

    def step_s(self, times: Seconds, places: Places, moves: Seconds, enough_s: float = float("inf")) -> float:
        """The best of the bounds, or the first that reaches `enough_s`.

        Args:
            times: of one run of each node. places: the sets of devices that each is on. moves: of the weights
                to each reader, as far as they are known.
        """
        best = 0.0
        for bound in self._bounds(times, places, moves, enough_s):
            best = max(best, bound)
            if best >= enough_s:
                break
        return best

    def _bounds(self, times: Seconds, places: Places, moves: Seconds, enough_s: float) -> Iterator[float]:
        work = {name: times[name] * self.rounds[name] for name in self.nodes}
        busy: dict[int, float] = {}
        for name in self.nodes:
            for resource in places[name]:
                busy[resource] = busy.get(resource, 0.0) + work[name]
        for reader, seconds in moves.items():
            for resource in {*places[reader], *places[self.trainer_of[reader]]}:
                busy[resource] += seconds
        yield max(busy.values(), default=0.0)
        arriving = {r: s for r, s in moves.items() if not self.lags[r, self.trainer_of[r]]}
        times = {**times, **{r: times[r] + s for r, s in arriving.items()}}  # directly before their readers
        work.update((r, work[r] + s) for r, s in arriving.items())
        for reach in self.reaches:
            wide = set(places[reach.first])
            if reach.first in arriving:
                wide.update(places[self.trainer_of[reach.first]])
            yield from self._ring(reach, wide, times, work, places, enough_s)

    def _ring(
        self,
        reach: Reach,
        wide: set[int],
        times: Seconds,
        work: Seconds,
        places: Places,
        enough_s: float,
    ) -> Iterator[float]:
        """`wide`: the devices that the first node occupies; `work`: of all runs of a node in a step."""
        heads = _heads(reach, times, work, places)
        lags = {name: self.lags.get((reach.first, name)) for name, _ in reach.nodes}
        closing = {name for name in lags if lags[name] == 0 or not wide.isdisjoint(places[name])}
        yield max((heads[name] + times[name] for name in closing), default=0.0)
        yield max(((heads[n] + times[n]) / (1 + lag) for n, lag in lags.items() if lag), default=0.0)
        if len(closing) < 2:
            return
        tails = _tails(reach, closing, times, work, places)
        jobs: dict[int, list[Job]] = {}
        for name, tail in tails.items():
            for resource in places[name]:
                jobs.setdefault(resource, []).append((heads[name], work[name], tail))
        yield max(map(machine_s, jobs.values()), default=0.0)
        if enough_s < float("inf") and self._too_long(reach, heads, times, tails, work, places, enough_s):
            yield enough_s

    def _too_long(
        self,
        reach: Reach,
        heads: Seconds,
        times: Seconds,
        tails: Seconds,
        work: Seconds,
        places: Places,
        enough_s: float,
    ) -> bool:
        """Whether no order of the nodes and of the values that cross lets the ring take less."""
        key = (reach.first, tuple(tails), tuple(map(places.__getitem__, self.nodes)))
        jobs = self._jobs.get(key)
        if jobs is None:
            names = [name for name, _ in reach.nodes if name in tails]
            met, whole = meetings(self.crossings, names, places), [n for n in names if self.rounds[n] == 1]
            jobs = self._jobs[key] = jobs_of(names, reach.before, places, met, whole)
        return bool(jobs.open) and too_long(jobs, heads, times, tails, work, enough_s)


def _heads(reach: Reach, times: Seconds, work: Seconds, places: Places) -> dict[str, float]:
    """The earliest start of each node: after the longest path to it, and after what has to be done before it
    on any one set of devices."""
    heads = {reach.first: 0.0}
    for name, before in reach.nodes[1:]:
        path = max(heads[b] + times[b] + gap for b, gap in before)
        heads[name] = max(path, _done_s(reach.before[name], heads, work, places))
    return heads


def _tails(
    reach: Reach, closing: set[str], times: Seconds, work: Seconds, places: Places
) -> dict[str, float]:
    """The least time from each node's end to that of the last closing one after it, where there is one."""
    tails = dict.fromkeys(closing, 0.0)
    for name, before in reversed(reach.nodes):
        if name not in tails:
            continue
        tails[name] = max(tails[name], _done_s(reach.after[name], tails, work, places))
        for b, gap in before:
            tails[b] = max(tails.get(b, 0.0), tails[name] + times[name] + gap)
    return tails


def _done_s(names: Iterable[str], known: Seconds, work: Seconds, places: Places) -> float:
    """When a set of devices can have done its part of `names`, each of which waits for a `known` time."""
    least: dict[int, float] = {}
    total: dict[int, float] = {}
    for name in names:
        if name in known:
            for resource in places[name]:
                least[resource] = min(least.get(resource, known[name]), known[name])
                total[resource] = total.get(resource, 0.0) + work[name]
    return max((least[r] + total[r] for r in total), default=0.0)


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


def _after(dag: nx.DiGraph[str], name: str) -> set[str]:
    return {last for _, last in nx.edge_dfs(dag, name)}


def _in_order(dag: nx.DiGraph[str], inside: set[str]) -> tuple[tuple[str, Before], ...]:
    order = nx.lexicographical_topological_sort(dag.subgraph(inside))
    return tuple(
        (name, tuple((b, dag.edges[b, name]["gap"]) for b in dag.predecessors(name) if b in inside))
        for name in order
    )
