"""What bounds of a graph's steps need to know of the sets of devices that its nodes are on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

import networkx as nx
import numpy as np

from hflow.compiler.planner.bounds.cross_mesh import CrossMeshValue, cross_mesh_transfers
from hflow.compiler.planner.bounds.descendants import Descendants
from hflow.compiler.planner.bounds.disjunctive import Jobs, jobs_of
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.bounds.recurrence import Places, RecurrenceCycle
from hflow.compiler.planner.bounds.windows import BEGIN, END, Window, windows


class PlacedGraph:
    """Nodes on their `places`.

    Args:
        all_descendants: of each node, what follows from it. lags: of the weights of readers, by reader and
        trainer. whole: nodes that run once in a step.
    """

    def __init__(
        self,
        dag: nx.DiGraph[str],
        all_descendants: Sequence[Descendants],
        lags: Mapping[tuple[str, str], int],
        cross_mesh_values: Sequence[CrossMeshValue],
        whole: Set[str],
        places: Places,
    ):
        self.dag, self.lags, self.cross_mesh_values, self.whole, self.places = (
            dag,
            lags,
            cross_mesh_values,
            whole,
            places,
        )
        self.own = {name: frozenset(on) for name, on in places.items()}
        self.all_descendants = [
            r for r in all_descendants if not any(self._longer(one, r.first) for one in all_descendants)
        ]
        self._cycles: dict[tuple[str, frozenset[int]], RecurrenceCycle] = {}
        self._jobs: dict[tuple[str, tuple[str, ...]], Jobs] = {}

    def cycle(self, descendants: Descendants, wide: frozenset[int]) -> RecurrenceCycle:
        """`wide`: the sets of devices of the first node, and of its trainer where weights move to it."""
        key = descendants.first, wide
        if key not in self._cycles:
            lags = {name: self.lags.get((descendants.first, name)) for name in descendants.before}
            closing = tuple(n for n in lags if lags[n] == 0 or not wide.isdisjoint(self.own[n]))
            later = {name: lag for name, lag in lags.items() if lag}
            self._cycles[key] = RecurrenceCycle.of(descendants, closing, later, self.places, self.whole)
        return self._cycles[key]

    def jobs(self, cycle: RecurrenceCycle) -> Jobs:
        """The nodes of a recurrence cycle, in any order that is possible."""
        names, key = list(cycle.nodes), (cycle.descendants.first, cycle.closing)
        if key not in self._jobs:
            met, whole = (
                cross_mesh_transfers(self.cross_mesh_values, names, self.places),
                [n for n in names if n in self.whole],
            )
            self._jobs[key] = jobs_of(names, cycle.descendants.before, self.places, met, whole)
        return self._jobs[key]

    @cached_property
    def windows(self) -> list[list[Window]]:
        """Of each transfer the windows that are possible."""
        if any(name not in self.whole for name in self.places):
            return []
        renewed = {(trainer, reader) for (reader, trainer), lag in self.lags.items() if not lag}
        met = cross_mesh_transfers(self.cross_mesh_values, list(self.places), self.places)
        found = (windows(self.dag, each, self.places, renewed) for each in met)
        lie = {**self.places, BEGIN: (), END: ()}
        return [[Window.of(each, lie) for each in possible] for possible in found if possible]

    @cached_property
    def on(self) -> Floats:
        """By node and set of devices, 1 where the node is on the set."""
        return np.array([[float(one in on) for one in self._sets] for on in self.own.values()])

    @cached_property
    def joined(self) -> Floats:
        """The same of the weights that come to a node from its trainer."""
        moving = {n: on.union(*(self.own[t] for r, t in self.lags if r == n)) for n, on in self.own.items()}
        return np.array([[float(one in on) for one in self._sets] for on in moving.values()])

    @cached_property
    def _sets(self) -> list[int]:
        return sorted(frozenset[int]().union(*self.own.values()))

    def _longer(self, descendants: Descendants, inner: str) -> bool:
        """Whether the recurrence cycle that `inner` begins is within that of `descendants`, wherever weights
        come from: it comes later, and whatever closes it closes both."""
        if inner not in descendants.before or inner == descendants.first:
            return False
        first = self.own[descendants.first]
        trained = [trainer for (reader, trainer) in self.lags if reader == inner]
        closed = all(name in descendants.before and not self.own[name].isdisjoint(first) for name in trained)
        return closed and first >= self.own[inner].union(*map(self.own.__getitem__, trained))
