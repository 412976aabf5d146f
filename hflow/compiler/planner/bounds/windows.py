"""What is done between a transfer of sets of devices and that of the next step.

All devices that take part do everything else of theirs in between: what comes after the transfer in one step,
then what comes before it in the next. Some nodes must come before or after it; for the others either may be,
and each choice makes a window of its own. The least that the shortest of them takes is a bound of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import networkx as nx
import numpy as np

from hflow.compiler.planner.bounds.cross_mesh import CrossMeshTransfer
from hflow.compiler.planner.bounds.descendants import Before, Descendants
from hflow.compiler.planner.bounds.numbers import ARRAYS, Floats
from hflow.compiler.planner.bounds.recurrence import Names, Places, parts_of

BEGIN, END = "<transfer>", "<next transfer>"
FREE = 4  # nodes that may be on either side; with more, nothing is said


@dataclass(frozen=True)
class Window:
    """Nodes that run once each between two transfers. `done`: what comes before each node on one set of
    devices, where paths alone do not tell when that is done: the first of it, and all."""

    descendants: Descendants
    done: Mapping[str, tuple[tuple[Names, Names], ...]]

    @staticmethod
    def of(descendants: Descendants, places: Places) -> Window:
        before = descendants.before
        done = {
            name: tuple((_first(p, before), p) for p in parts_of(others, places) if not _in_turn(p, before))
            for name, others in before.items()
        }
        return Window(descendants, done)

    def heads(self, times: Mapping[str, Floats]) -> dict[str, Floats]:
        """The earliest start of each node: after the longest path to it, and after what has to be done before
        it on any one set of devices."""
        heads = {self.descendants.first: np.zeros_like(times[self.descendants.first])}
        for name, before in self.descendants.nodes[1:]:
            paths = (heads[b] + times[b] + gap for b, gap in before)
            done = (
                ARRAYS.least([heads[n] for n in first]) + np.array([times[n] for n in part]).sum(axis=0)
                for first, part in self.done[name]
            )
            heads[name] = ARRAYS.most((*paths, *done))
        return heads


def _first(part: Names, before: Mapping[str, Names]) -> Names:
    """Those with no other of the part before them; others start later."""
    return tuple(name for name in part if set(part).isdisjoint(before[name]))


def _in_turn(part: Names, before: Mapping[str, Names]) -> bool:
    """Whether of each two the one waits for the other: then a path leads through all of them."""
    return all(one in before[other] or other in before[one] for one, other in combinations(part, 2))


def windows(
    dag: nx.DiGraph[str],
    transfer: CrossMeshTransfer,
    places: Mapping[str, tuple[int, ...]],
    renewed: Collection[tuple[str, str]],
) -> tuple[Descendants, ...]:
    """The windows of a transfer, from BEGIN to END; none where there are too many.

    Args:
        dag: nodes with models, with the least time between them as `gap`.
        renewed: a trainer and a reader that waits for its training of the step before.
    """
    order = list(nx.lexicographical_topological_sort(dag))
    here = {name for name in order if not transfer.devices.isdisjoint(places[name])}
    free = [n for n in order if n in here and n not in transfer.after and n not in transfer.before]
    if len(free) > FREE:
        return ()
    return tuple(
        _window(dag, order, set(late), [n for n in order if n in early], here, places, renewed)
        for early, late in _sides(dag, transfer, free)
    )


def _sides(
    dag: nx.DiGraph[str], transfer: CrossMeshTransfer, free: list[str]
) -> Iterator[tuple[set[str], set[str]]]:
    """Which nodes are before the transfer and which after it, in every way that is possible."""
    for count in range(len(free) + 1):
        for chosen in combinations(free, count):
            early, late = {*transfer.after, *chosen}, {*transfer.before, *free} - {*chosen}
            follows = late.union(*(nx.descendants(dag, name) for name in late))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            if early.isdisjoint(follows):
                yield early, follows


def _window(
    dag: nx.DiGraph[str],
    order: list[str],
    late: set[str],
    early: list[str],
    here: set[str],
    places: Mapping[str, tuple[int, ...]],
    renewed: Collection[tuple[str, str]],
) -> Descendants:
    """First what is `late` in one step, then what is `early` in the next. What may have begun before the
    transfer is left out."""
    nodes: list[tuple[str, Before]] = [(BEGIN, ())]
    for name in (n for n in order if n in late):
        before = [(b, dag.edges[b, name]["gap"]) for b in dag.predecessors(name) if b in late]
        nodes.append((name, (*before, (BEGIN, 0.0))))
    known = set(late)
    for name in early:
        before = [(b, dag.edges[b, name]["gap"]) for b in dag.predecessors(name) if b in known - late]
        waits = (b for b in order if b in late)
        before += [(b, 0.0) for b in waits if (b, name) in renewed or {*places[b]} & {*places[name]}]
        before += [(BEGIN, 0.0)] if name in here else []
        if before:
            nodes.append((name, tuple(before)))
            known.add(name)
    ends = [n for n, _ in nodes[1:] if n in here or n not in late]
    nodes.append((END, (*((n, 0.0) for n in ends), (BEGIN, 0.0))))
    return Descendants(BEGIN, tuple(nodes))
