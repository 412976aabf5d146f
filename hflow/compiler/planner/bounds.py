"""What no schedule can beat: lower bounds of a step's time, from the times of its nodes alone.

1. A set of devices does everything that is put on it once per step.
2. It does all of one step before the next (`timeline`), and a reader of a trained model waits for the
   training of the step before. So nodes that share devices with a node, or train what it reads, end before
   its next run: they *close* the ring that begins with it. What lies between is done within a step: the
   longest path to a closing node; and for every set of devices its part of that work, between the earliest
   start of it and the least time from its end to a closing node (one-machine bound).
3. With weights of `lag` steps more, a ring takes so many steps more.
4. Sets of devices that hand values on meet once per step, and do everything else of theirs in between
   (`windows`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

import networkx as nx
import numpy as np

from hflow.compiler.draft import Draft
from hflow.compiler.planner.crossings import crossings, meetings
from hflow.compiler.planner.numbers import ARRAYS, FLOATS, Bools, Floats, Ints, Job, N, Numbers
from hflow.compiler.planner.reach import Before, Reach
from hflow.compiler.planner.step import PYTHON_CALL_S
from hflow.compiler.planner.turns import Jobs, jobs_of, too_long
from hflow.compiler.planner.windows import BEGIN, END, windows
from hflow.compiler.workload import rounds

Places = Mapping[str, tuple[int, ...]]  # resources by node


@dataclass(frozen=True)
class Ring(Generic[N]):
    """`least_s`: what it takes at least; `heads`, `tails`: the earliest starts of nodes and the least that
    follows them, without tails where a single node closes it."""

    least_s: N
    heads: Mapping[str, N]
    tails: Mapping[str, N]


class Bounds:
    """The bounds of one graph."""

    def __init__(self, draft: Draft):
        graph = draft.graph
        self.nodes = tuple(n.name for n in graph.nodes if n.model)
        self.rounds = {name: rounds(graph, graph.node(name)) for name in self.nodes}
        edges = [e for e in draft.weight_edges if not e.every]
        self.trainer_of = {e.reader: e.trainer for e in edges}
        self.lags = {(e.reader, e.trainer): e.lag for e in edges}
        self.dag = dag = _of_models(graph.dag(), self.nodes)
        self.crossings = crossings(graph, self.nodes)
        self._windows: dict[object, list[tuple[Reach, ...]]] = {}
        self._jobs: dict[object, Jobs] = {}
        self.reaches = tuple(Reach(name, _in_order(dag, {name, *_after(dag, name)})) for name in self.nodes)

    def step_s(self, times: Mapping[str, float], places: Places) -> float:
        """The best of the bounds, if no weights move.

        Args:
            times: of one run of each node. places: the sets of devices that each is on.
        """
        work = {name: times[name] * self.rounds[name] for name in self.nodes}
        best = max(_busy(work, places).values(), default=0.0)
        for reach in self.reaches:
            best = max(best, self._ring(FLOATS, reach, set(places[reach.first]), times, work, places).least_s)
        return best

    def steps_s(
        self,
        times: Mapping[str, Floats],
        places: Places,
        moves: Mapping[str, Floats],
        enough_s: float,
        closely: bool = True,
    ) -> Floats:
        """The same for many choices at once, and closer: the best of the bounds, or one that is not below
        `enough_s`.

        Args:
            times: of each node, by choice. moves: of the weights to each reader, NaN where none move or it is
                not known yet. closely: look also at what is done between two meetings, which takes longer.
        """
        seconds = {reader: np.nan_to_num(each) for reader, each in moves.items()}
        work = {name: times[name] * self.rounds[name] for name in self.nodes}
        busy = _busy(work, places)
        for reader in moves:
            for resource in {*places[reader], *places[self.trainer_of[reader]]}:
                busy[resource] = busy[resource] + seconds[reader]
        best = ARRAYS.most(busy.values())
        arriving = {r: s for r, s in seconds.items() if not self.lags[r, self.trainer_of[r]]}
        late = {name: arriving.get(name, 0.0) for name in self.nodes}  # directly before their readers
        lasting = np.stack([times[name] + late[name] for name in self.nodes])
        worked = np.stack([work[name] + late[name] for name in self.nodes])
        for reach in self.reaches:
            for some, wide in self._alike(reach.first, arriving, moves, best < enough_s, places):
                found = self._rings_s(reach, wide, lasting[:, some], worked[:, some], places, enough_s)
                best[some] = np.maximum(best[some], found)
        left = np.flatnonzero(best < enough_s)
        if closely and left.size and enough_s < np.inf:
            best[left[self._meet_late(lasting[:, left], worked[:, left], places, enough_s)]] = enough_s
        return best

    def _rings_s(
        self, reach: Reach, wide: set[int], lasting: Floats, worked: Floats, places: Places, enough_s: float
    ) -> Floats:
        """What one ring takes at least, by choice; `enough_s` where no order of its nodes takes less.

        Args:
            lasting, worked: by node and choice, what one run takes, and all of a step.
        """
        times, work = dict(zip(self.nodes, lasting)), dict(zip(self.nodes, worked))
        ring = self._ring(ARRAYS, reach, wide, times, work, places)
        best, left = ring.least_s.copy(), np.flatnonzero(ring.least_s < enough_s)
        if left.size and ring.tails and enough_s < np.inf:
            jobs = self._jobs_of(reach, ring, places)
            long = too_long(jobs, left, ring.heads, times, ring.tails, work, enough_s)
            best[left[long]] = enough_s
        return best

    def _meet_late(self, lasting: Floats, worked: Floats, places: Places, enough_s: float) -> Bools:
        """For which choices some sets of devices cannot meet twice within that time."""
        nothing = np.zeros(lasting.shape[1])
        ends = {BEGIN: nothing, END: nothing}
        times, work = ({**dict(zip(self.nodes, each)), **ends} for each in (lasting, worked))
        places, late = {**places, BEGIN: (), END: ()}, np.zeros(nothing.shape, dtype=np.bool_)
        for ways in self._windows_of(places):
            some = np.flatnonzero(~late)
            for way in ways:
                taken, done = ({n: each[n][some] for n, _ in way.nodes} for each in (times, work))
                some = some[_heads(ARRAYS, way, taken, done, places)[END] >= enough_s]
            late[some] = True
        return late

    def _windows_of(self, places: Places) -> list[tuple[Reach, ...]]:
        """Of each meeting the windows that are possible."""
        key = tuple(map(places.__getitem__, self.nodes))
        if key not in self._windows:
            met = meetings(self.crossings, self.nodes, places) if set(self.rounds.values()) == {1} else []
            renewed = {(trainer, reader) for (reader, trainer), lag in self.lags.items() if not lag}
            found = (windows(self.dag, each, places, renewed) for each in met)
            self._windows[key] = [ways for ways in found if ways]
        return self._windows[key]

    def _alike(
        self,
        first: str,
        arriving: Collection[str],
        moves: Mapping[str, Floats],
        open_: Bools,
        places: Places,
    ) -> Iterator[tuple[Ints, set[int]]]:
        """Numbers of the choices that are `open_`, with the devices that a ring begins on: those of its first
        node, and those from which weights come to it."""
        if first not in arriving:
            parts = [(open_, set(places[first]))]
        else:
            still, both = np.isnan(moves[first]), {*places[first], *places[self.trainer_of[first]]}
            parts = [(open_ & still, set(places[first])), (open_ & ~still, both)]
        for part, wide in parts:
            some = np.flatnonzero(part)
            if some.size:
                yield some, wide

    def _ring(
        self,
        numbers: Numbers[N],
        reach: Reach,
        wide: set[int],
        times: Mapping[str, N],
        work: Mapping[str, N],
        places: Places,
    ) -> Ring[N]:
        """`wide`: the devices that the first node occupies; `work`: of all runs of a node in a step."""
        heads = _heads(numbers, reach, times, work, places)
        lags = {name: self.lags.get((reach.first, name)) for name, _ in reach.nodes}
        closing = [name for name in lags if lags[name] == 0 or not wide.isdisjoint(places[name])]
        ends = [heads[name] + times[name] for name in closing]
        ends += [(heads[name] + times[name]) / (1 + lag) for name, lag in lags.items() if lag]
        zero = numbers.zero(times[reach.first])
        if len(closing) < 2:
            return Ring(numbers.most((zero, *ends)), heads, {})
        tails = _tails(numbers, reach, closing, times, work, places)
        jobs: dict[int, list[Job[N]]] = {}
        for name, tail in tails.items():
            for resource in places[name]:
                jobs.setdefault(resource, []).append((heads[name], work[name], tail))
        return Ring(numbers.most((zero, *ends, *map(numbers.machine_s, jobs.values()))), heads, tails)

    def _jobs_of(self, reach: Reach, ring: Ring[Floats], places: Places) -> Jobs:
        key = (reach.first, tuple(ring.tails), tuple(map(places.__getitem__, self.nodes)))
        jobs = self._jobs.get(key)
        if jobs is None:
            names = [name for name, _ in reach.nodes if name in ring.tails]
            met, whole = meetings(self.crossings, names, places), [n for n in names if self.rounds[n] == 1]
            jobs = self._jobs[key] = jobs_of(names, reach.before, places, met, whole)
        return jobs


def _busy(work: Mapping[str, N], places: Places) -> dict[int, N]:
    """What each set of devices does in a step."""
    busy: dict[int, N] = {}
    for name, seconds in work.items():
        for resource in places[name]:
            busy[resource] = busy[resource] + seconds if resource in busy else seconds
    return busy


def _heads(
    numbers: Numbers[N], reach: Reach, times: Mapping[str, N], work: Mapping[str, N], places: Places
) -> dict[str, N]:
    """The earliest start of each node: after the longest path to it, and after what has to be done before it
    on any one set of devices."""
    heads = {reach.first: numbers.zero(times[reach.first])}
    for name, before in reach.nodes[1:]:
        paths = (heads[b] + times[b] + gap for b, gap in before)
        heads[name] = numbers.most((*paths, *_done_s(numbers, reach.before[name], heads, work, places)))
    return heads


def _tails(
    numbers: Numbers[N],
    reach: Reach,
    closing: Iterable[str],
    times: Mapping[str, N],
    work: Mapping[str, N],
    places: Places,
) -> dict[str, N]:
    """The least time from each node's end to that of the last closing one after it, where there is one."""
    tails = {name: numbers.zero(times[name]) for name in closing}
    for name, before in reversed(reach.nodes):
        if name not in tails:
            continue
        done = _done_s(numbers, reach.after[name], tails, work, places)
        tails[name] = numbers.most((tails[name], *done))
        for b, gap in before:
            path = tails[name] + times[name] + gap
            tails[b] = numbers.most((tails[b], path)) if b in tails else path
    return tails


def _done_s(
    numbers: Numbers[N], names: Iterable[str], known: Mapping[str, N], work: Mapping[str, N], places: Places
) -> Iterator[N]:
    """When each set of devices can have done its part of `names`, each of which waits for a `known` time."""
    parts: dict[int, list[str]] = {}
    for name in names:
        if name in known:
            for resource in places[name]:
                parts.setdefault(resource, []).append(name)
    for part in parts.values():
        yield numbers.least([known[n] for n in part]) + sum(work[n] for n in part)


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
