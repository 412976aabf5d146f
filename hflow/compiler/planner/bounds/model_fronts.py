"""How fast the node groups of one model can be together.

What is fastest for one of them may be slow for another: nodes of a node group share a layout, and weights
move between a trainer and readers whose weights lie differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import le

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.effort import PAIR
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.weight_syncs import WeightCopy, WeightSync

UNMOVED = -1.0  # better than what moves in no time: no device waits for another
Needs = tuple[float, ...]  # of one node after the other: its seconds, and those of what moves to it
Renew = Callable[[NodeGroup, Assignment, Mapping[str, Assignment]], WeightSync | None]
MANY = 30  # choices for the node groups of a model: fewer are gone through sooner than they are bounded


@dataclass(frozen=True)
class TimedAssignment:
    """An assignment, with what its nodes take at least when all other node groups leave as much memory as
    they can."""

    assignment: Assignment
    times: tuple[float, ...]


@dataclass(frozen=True)
class ModelPoint:
    """One Pareto point of a model: the `times` of all its nodes, in seconds, and those of the weight transfer
    to each reader (`moves`)."""

    times: Mapping[str, float]
    moves: Mapping[str, float]


def promising(
    groups: Sequence[NodeGroup],
    places: Mapping[str, Sequence[TimedAssignment]],
    least: Mapping[str, float],
    bound: Callable[[Mapping[str, Floats]], Floats],
    limit_s: float,
) -> dict[str, Sequence[TimedAssignment]]:
    """Where the node groups of a model may be in a plan whose step is below the limit.

    Args:
        least: what each node of the graph takes at least.
        bound: of steps, by what all nodes take.
    """
    found = {group.name: places[group.name] for group in groups}
    if prod(map(len, found.values())) < MANY or limit_s == float("inf"):
        return found
    for group in groups:
        each = found[group.name]
        own = dict(zip((node.name for node in group.nodes), np.array([place.times for place in each]).T))
        bounds_s = bound({name: own.get(name, np.full(len(each), s)) for name, s in least.items()})
        found[group.name] = [place for place, bound_s in zip(each, bounds_s) if bound_s < limit_s]
    return found


class ModelParetoFronts:
    """The points of models, kept: most allocations put a model where some other does."""

    def __init__(self, best: Incumbent):
        self.best = best
        self._known: dict[object, list[ModelPoint]] = {}

    def of(
        self, groups: Sequence[NodeGroup], places: Mapping[str, Sequence[TimedAssignment]]
    ) -> list[ModelPoint]:
        """Those of all choices for the node groups of a model that no other choice beats in all respects.

        Args:
            groups: of one model, the trainer's before those that read from it.
            places: of each node group, on the same devices. With more memory no time is longer and no place
            is lost, so that equal times are those of equal places.
        """
        key = tuple((group.name, _where(places[group.name])) for group in groups)
        if key not in self._known:
            self._known[key] = [_point(groups, needs) for needs in self._unbeaten(groups, places)]
        return self._known[key]

    def _unbeaten(
        self, groups: Sequence[NodeGroup], places: Mapping[str, Sequence[TimedAssignment]]
    ) -> list[Needs]:
        if not all(places[group.name] for group in groups):
            return []
        syncs = self.best.space.weight_syncs
        choosing, before = _Choosing(groups, places, syncs.of), syncs.effort
        choosing.extend({}, frozenset(), ())
        self.best.effort += PAIR * choosing.looked_at + syncs.effort - before
        return choosing.kept


def _where(places: Sequence[TimedAssignment]) -> object:
    devices = places[0].assignment.devices if places else ()
    return devices[:1], len(devices), tuple(place.times for place in places)


def _point(groups: Sequence[NodeGroup], needs: Needs) -> ModelPoint:
    names = [node.name for group in groups for node in group.nodes]
    moves = {name: seconds for name, seconds in zip(names, needs[1::2]) if seconds != UNMOVED}
    return ModelPoint(dict(zip(names, needs[::2])), moves)


class _Choosing:
    """Goes through the choices for the node groups of a model. `kept`: what all nodes need in those that no
    other beats; `least`: what the nodes of the last node groups need at least, of all of them last;
    `looked_at`: assignments, each after those before it. `renew`: how the weights of a node group in an
    assignment are renewed, if the node groups before it have their assignments."""

    def __init__(
        self, groups: Sequence[NodeGroup], places: Mapping[str, Sequence[TimedAssignment]], renew: Renew
    ):
        self.groups, self.places, self.renew = groups, places, renew
        self.kept: list[Needs] = []
        self._beats: Needs | None = None  # what beat others last: it often beats the next ones too
        self.looked_at = 0
        self.least: list[Needs] = [()]
        for group in reversed(groups):
            fastest = map(min, zip(*(place.times for place in places[group.name])))
            self.least.append(_needs(group, tuple(fastest)) + self.least[-1])

    def extend(
        self, assignments: Mapping[str, Assignment], copies: frozenset[WeightCopy], needs: Needs
    ) -> None:
        """Args: `needs`: of the node groups that have `assignments`, which come first."""
        if len(assignments) == len(self.groups):
            self.kept = [*(known for known in self.kept if not all(map(le, needs, known))), needs]
            return
        group = self.groups[len(assignments)]
        self.looked_at += len(self.places[group.name])
        for place in self.places[group.name]:
            if self._beaten(needs + _needs(group, place.times), len(assignments) + 1):
                continue
            found = self.renew(group, place.assignment, assignments)
            new = found if found and found.copy not in copies else None
            renewed = copies | {new.copy} if new else copies
            more = needs + _needs(group, place.times, new)
            if not new or not self._beaten(more, len(assignments) + 1):
                self.extend({**assignments, group.name: place.assignment}, renewed, more)

    def _beaten(self, needs: Needs, level: int) -> bool:
        """Whether what begins so is, with the fastest of the others, no better than what is known."""
        every = needs + self.least[len(self.groups) - level]
        if self._beats and all(map(le, self._beats, every)):
            return True
        found = next((known for known in self.kept if all(map(le, known, every))), None)
        self._beats = found or self._beats
        return found is not None


def _needs(group: NodeGroup, times: Sequence[float], weight_sync: WeightSync | None = None) -> Needs:
    reader, moves_s = (weight_sync.reader, weight_sync.seconds) if weight_sync else ("", UNMOVED)
    moves = (moves_s if node.name == reader else UNMOVED for node in group.nodes)
    return tuple(chain.from_iterable(zip(times, moves)))
