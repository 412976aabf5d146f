"""What bounds of a graph's steps need to know of the sets of devices that its nodes are on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

import networkx as nx

from hflow.compiler.planner.bounds.crossings import Crossing, meetings
from hflow.compiler.planner.bounds.disjunctive import Jobs, jobs_of
from hflow.compiler.planner.bounds.reach import Reach
from hflow.compiler.planner.bounds.recurrence import Course, Places, Ring
from hflow.compiler.planner.bounds.windows import BEGIN, END, windows


class Placed:
    """Nodes on their `places`.

    Args:
        reaches: of each node. lags: of the weights of readers, by reader and trainer. whole: nodes that run
            once in a step.
    """

    def __init__(
        self,
        dag: nx.DiGraph[str],
        reaches: Sequence[Reach],
        lags: Mapping[tuple[str, str], int],
        crossings: Sequence[Crossing],
        whole: Set[str],
        places: Places,
    ):
        self.dag, self.lags, self.crossings, self.whole, self.places = dag, lags, crossings, whole, places
        self.own = {name: frozenset(on) for name, on in places.items()}
        self.reaches = [r for r in reaches if not any(self._longer(one, r.first) for one in reaches)]
        self._rings: dict[tuple[str, frozenset[int]], Ring] = {}
        self._jobs: dict[int, Jobs] = {}

    def ring(self, reach: Reach, wide: frozenset[int]) -> Ring:
        """`wide`: the devices that the first node occupies."""
        key = reach.first, wide
        if key not in self._rings:
            lags = {name: self.lags.get((reach.first, name)) for name in reach.before}
            closing = tuple(n for n in lags if lags[n] == 0 or not wide.isdisjoint(self.own[n]))
            later = {name: lag for name, lag in lags.items() if lag}
            self._rings[key] = Ring.of(self._course(reach), closing, later, self.places, self.whole)
        return self._rings[key]

    def jobs(self, ring: Ring) -> Jobs:
        """The nodes of a ring, in any order that is possible."""
        if id(ring) not in self._jobs:
            names, before = list(ring.left.nodes), ring.course.reach.before
            met, whole = meetings(self.crossings, names, self.places), [n for n in names if n in self.whole]
            self._jobs[id(ring)] = jobs_of(names, before, self.places, met, whole)
        return self._jobs[id(ring)]

    @cached_property
    def windows(self) -> list[list[Course]]:
        """Of each meeting the windows that are possible."""
        if any(name not in self.whole for name in self.places):
            return []
        renewed = {(trainer, reader) for (reader, trainer), lag in self.lags.items() if not lag}
        met = meetings(self.crossings, list(self.places), self.places)
        found = (windows(self.dag, each, self.places, renewed) for each in met)
        lie = {**self.places, BEGIN: (), END: ()}
        return [[Course.of(way, lie, lie.keys()) for way in ways] for ways in found if ways]

    def _course(self, reach: Reach) -> Course:
        return Course.of(reach, self.places, self.whole)

    def _longer(self, reach: Reach, inner: str) -> bool:
        """Whether the ring that `inner` begins is within that of `reach`, wherever weights come from: it
        comes later, and whatever closes it closes both."""
        if inner not in reach.before or inner == reach.first:
            return False
        first = self.own[reach.first]
        trained = [trainer for (reader, trainer) in self.lags if reader == inner]
        closed = all(name in reach.before and not self.own[name].isdisjoint(first) for name in trained)
        return closed and first >= self.own[inner].union(*map(self.own.__getitem__, trained))
