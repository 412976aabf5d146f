"""What no schedule can beat: lower bounds of a step's time, from the times of its nodes alone.

1. A set of devices does everything that is put on it once per step, calls without a model too.
2. It does all of one step before the next (`schedule/task_times.py`), and a reader of a trained model
   waits for the training of the step before. So nodes that share devices with a node, or train what it reads,
   end before its next run: they *close* the recurrence cycle that begins with it. What lies between is done
   within a
   step: the longest path to a closing node; and for every set of devices its part of that work, between the
   earliest start of it and the least time from its end to a closing node (one-machine bound).
3. With weights of `lag` steps more, a recurrence cycle takes so many steps more.
4. Sets of devices that hand values on take part in one transfer per step, and do everything else of theirs in
   between (`windows`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import networkx as nx
import numpy as np

from hflow.compiler.planner.bounds.cross_mesh import cross_mesh_values, hosts
from hflow.compiler.planner.bounds.descendants import Before, Descendants
from hflow.compiler.planner.bounds.disjunctive import too_long
from hflow.compiler.planner.bounds.numbers import ARRAYS, FLOATS, Bools, Floats, Ints, N, known
from hflow.compiler.planner.bounds.placed_graph import PlacedGraph
from hflow.compiler.planner.bounds.recurrence import Places, RecurrenceCycle
from hflow.compiler.planner.bounds.windows import BEGIN, END
from hflow.compiler.planner.step import PYTHON_CALL_S
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.workload import rounds

# Of the limit: where recurrence cycles took less, no order of nodes was ever found to be too long.
CLOSE = 0.9


class Bounds:
    """The bounds of one graph. `nodes`: those with models, each in a `row` of arrays; `counts`: how often
    each runs in a step; `calls`: the seconds of what else runs on its devices."""

    def __init__(self, draft: Draft):
        graph = draft.graph
        self.nodes = tuple(n.name for n in graph.nodes if n.model)
        self.rounds = {name: rounds(graph, graph.node(name)) for name in self.nodes}
        self.row = {name: number for number, name in enumerate(self.nodes)}
        self.counts = np.array(list(self.rounds.values()))
        edges = [e for e in draft.weight_edges if not e.every]
        self.trainer_of = {e.reader: e.trainer for e in edges}
        self.lags = {(e.reader, e.trainer): e.lag for e in edges}
        self.dag = dag = _of_models(graph.dag(), self.nodes)
        self._calls_s = _calls_s(graph, self.nodes)
        self.calls = np.array(list(self._calls_s.values()))
        self.cross_mesh_values = cross_mesh_values(graph, self.nodes)
        self._placed: dict[object, PlacedGraph] = {}
        self.all_descendants = tuple(Descendants(n, _in_order(dag, {n, *_after(dag, n)})) for n in self.nodes)

    def step_s(self, times: Mapping[str, float], places: Places) -> float:
        """The best of the bounds, if no weights move.

        Args:
            times: of one run of each node. places: the sets of devices that each is on.
        """
        work = {name: times[name] * self.rounds[name] for name in self.nodes}
        busy = {name: seconds + self._calls_s[name] for name, seconds in work.items()}
        best = max(_busy(busy, places).values(), default=0.0)
        if max(times.values()) == float("inf"):
            return float("inf")
        placed = self.placed(places)
        for descendants in placed.all_descendants:
            cycle = placed.cycle(descendants, placed.own[descendants.first])
            if not cycle.alone:
                best = max(best, cycle.least_s(FLOATS, times, work))
        return best

    def steps_s(
        self,
        times: Mapping[str, Floats],
        places: Places,
        moves: Mapping[str, Floats],
        enough_s: float,
        depth: int = 2,
    ) -> Floats:
        """The same for many choices at once, and closer: the best of the bounds, or one that is not below
        `enough_s`.

        Args:
            times: of each node, by choice. moves: of the weights to each reader, NaN where none move or it is
                not known yet. depth: 0 for recurrence cycles alone; with 1 also orders of nodes, with 2 also
                what is done between two transfers, which take longer.
        """
        lasting = np.array([times[name] for name in self.nodes])
        worked = lasting * self.counts[:, None]
        busy = _busy(dict(zip(self.nodes, worked + self.calls[:, None])), places)
        seconds = {reader: known(each) for reader, each in moves.items()}
        for reader in moves:
            for resource in {*places[reader], *places[self.trainer_of[reader]]}:
                busy[resource] = busy[resource] + seconds[reader]
        best = np.array(list(busy.values())).max(axis=0)
        arriving = [reader for reader in moves if not self.lags[reader, self.trainer_of[reader]]]
        for row, reader in ((self.row[reader], reader) for reader in arriving):
            lasting[row] += seconds[reader]  # directly before their readers
            worked[row] += seconds[reader]
        placed = self.placed(places)
        for descendants in placed.all_descendants:
            for some, wide in self._alike(descendants.first, arriving, moves, best < enough_s, placed):
                cycle = placed.cycle(descendants, wide)
                if cycle.alone:
                    continue
                found = self._cycles_s(cycle, placed, lasting[:, some], worked[:, some], enough_s, depth > 0)
                best[some] = np.maximum(best[some], found)
        left = np.flatnonzero(best < enough_s)
        if depth > 1 and left.size and enough_s < np.inf:
            best[left[self._meet_late(placed, lasting[:, left], enough_s)]] = enough_s
        return best

    def placed(self, places: Places) -> PlacedGraph:
        """The graph with its nodes on these sets of devices."""
        key = tuple(map(places.__getitem__, self.nodes))
        if key not in self._placed:
            whole = {name for name, times in self.rounds.items() if times == 1}
            own = dict(zip(self.nodes, key))
            self._placed[key] = PlacedGraph(
                self.dag, self.all_descendants, self.lags, self.cross_mesh_values, whole, own
            )
        return self._placed[key]

    def _cycles_s(
        self,
        cycle: RecurrenceCycle,
        placed: PlacedGraph,
        lasting: Floats,
        worked: Floats,
        enough_s: float,
        orders: bool,
    ) -> Floats:
        """What one recurrence cycle takes at least, by choice, or something not below `enough_s`. Most
        choices are cut by the paths of nodes alone.

        Args:
            lasting, worked: by node and choice, what one run takes, and all of a step. orders: whether to
                look at the orders of nodes too.
        """
        times, work = dict(zip(self.nodes, lasting)), dict(zip(self.nodes, worked))
        heads = cycle.heads(ARRAYS, times)
        best = cycle.ends_s(ARRAYS, heads, times)
        left = np.flatnonzero(best < enough_s)
        if len(cycle.closing) < 2 or not left.size:
            return best
        heads, times, work = ({n: each[n][left] for n in cycle.nodes} for each in (heads, times, work))
        tails = cycle.tails(ARRAYS, times)
        best[left] = np.maximum(best[left], cycle.busiest_s(ARRAYS, heads, work, tails))
        close = np.flatnonzero((best[left] < enough_s) & (best[left] >= CLOSE * enough_s))
        if orders and close.size and enough_s < np.inf:
            long = too_long(placed.jobs(cycle), close, heads, times, tails, work, enough_s)
            best[left[close[long]]] = enough_s
        return best

    def _meet_late(self, placed: PlacedGraph, lasting: Floats, enough_s: float) -> Bools:
        """For which choices the time from a transfer to that of the next step is `enough_s` or more."""
        nothing = np.zeros(lasting.shape[1])
        times = {**dict(zip(self.nodes, lasting)), BEGIN: nothing, END: nothing}
        late = np.zeros(nothing.shape, dtype=np.bool_)
        for alternatives in placed.windows:
            some = np.flatnonzero(~late)
            for window in alternatives:
                taken = {n: times[n][some] for n in window.done}
                some = some[window.heads(taken)[END] >= enough_s]
            late[some] = True
        return late

    def _alike(
        self,
        first: str,
        arriving: Collection[str],
        moves: Mapping[str, Floats],
        open_: Bools,
        placed: PlacedGraph,
    ) -> Iterator[tuple[Ints, frozenset[int]]]:
        """Numbers of the choices that are `open_`, with the devices that a recurrence cycle begins on: those
        of its first node, and those from which weights come to it."""
        own = placed.own[first]
        both = own | placed.own[self.trainer_of[first]] if first in arriving else own
        parts = [(open_, own)]
        if both > own:
            still = np.isnan(moves[first])
            parts = [(open_ & still, own), (open_ & ~still, both)]
        for part, wide in parts:
            some = np.flatnonzero(part)
            if some.size:
                yield some, wide


def _busy(work: Mapping[str, N], places: Places) -> dict[int, N]:
    """What each set of devices does in a step."""
    busy: dict[int, N] = {}
    for name, seconds in work.items():
        for resource in places[name]:
            busy[resource] = busy[resource] + seconds if resource in busy else seconds
    return busy


def _calls_s(graph: Graph, nodes: Collection[str]) -> dict[str, float]:
    """By node with a model, what the nodes without one take in a step that run on its devices; those of loops
    are left out."""
    loops, found = {n.name for n in graph.nodes if n.op == "repeat"}, dict.fromkeys(nodes, 0.0)
    for name, host in hosts(graph).items():
        if name != host and graph.node(name).region not in loops:
            found[host] += PYTHON_CALL_S
    return found


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
