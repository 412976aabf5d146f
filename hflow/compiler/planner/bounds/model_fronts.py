"""How fast the node groups of one model can be together.

What is fastest for one of them may be slow for another: nodes of a node group share a layout, and weights
move between a trainer and readers whose weights lie differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from math import prod
from operator import le

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.model_points import ModelPoints
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.effort import PAIR
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.unused_hosts import unused_before
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


PlacesByGroup = Mapping[str, Sequence[TimedAssignment]]


def promising(
    models: Sequence[tuple[Sequence[NodeGroup], PlacesByGroup]],
    least: Mapping[str, float],
    bound: Callable[[Mapping[str, Floats]], Floats],
    limit_s: float,
) -> list[PlacesByGroup]:
    """Where the node groups of each of some models may be in a plan whose step is below the limit.

    Args:
        models: the node groups of each, and all their places.
        least: what each node of the graph takes at least.
        bound: of steps, by what all nodes take.
    """
    found = [{group.name: places[group.name] for group in groups} for groups, places in models]
    many = [
        (of_model, group)
        for of_model, (groups, _) in zip(found, models)
        if prod(map(len, of_model.values())) >= MANY
        for group in groups
    ]
    if not many or limit_s == float("inf"):
        return list(found)
    ends = np.cumsum([len(of_model[group.name]) for of_model, group in many])
    taking = {name: np.full(ends[-1], seconds) for name, seconds in least.items()}
    for (of_model, group), end in zip(many, ends):
        times = np.array([place.times for place in of_model[group.name]])
        for node, seconds in zip(group.nodes, times.T):
            taking[node.name][end - len(times) : end] = seconds
    for (of_model, group), below in zip(many, np.split(bound(taking) < limit_s, ends[:-1])):
        of_model[group.name] = list(compress(of_model[group.name], below))
    return list(found)


class ModelParetoFronts:
    """The points of models, kept: most allocations put a model where some other does."""

    def __init__(self, best: Incumbent):
        self.best = best
        self._known: dict[object, ModelPoints] = {}

    def of(self, groups: Sequence[NodeGroup], places: PlacesByGroup) -> ModelPoints:
        """Those of all choices for the node groups of a model that no other choice beats in all respects.

        Args:
            groups: of one model, the trainer's before those that read from it.
            places: of each node group, on the same devices. With more memory no time is longer and no place
            is lost, so that equal times are those of equal places.
        """
        key = tuple(group.name for group in groups), self._where([places[group.name] for group in groups])
        if key not in self._known:
            self._known[key] = _points(groups, self._unbeaten(groups, places))
        return self._known[key]

    def _where(self, every: Sequence[Sequence[TimedAssignment]]) -> object:
        """Equal for places between which weights move alike; None where a node group has none."""
        if not all(every):
            return None
        rows = [places[0].assignment.devices for places in every]
        before = unused_before(self.best.space.draft.cluster, rows)
        firsts = [(row[0] - unused, len(row)) for row, unused in zip(rows, before)]
        return *firsts, *(tuple(place.times for place in places) for places in every)

    def _unbeaten(self, groups: Sequence[NodeGroup], places: PlacesByGroup) -> list[Needs]:
        if not all(places[group.name] for group in groups):
            return []
        syncs = self.best.space.weight_syncs
        choosing, before = _Choosing(groups, places, syncs.of), syncs.effort
        choosing.extend({}, frozenset(), ())
        self.best.effort += PAIR * choosing.looked_at + syncs.effort - before
        return choosing.kept


def _points(groups: Sequence[NodeGroup], every: Sequence[Needs]) -> ModelPoints:
    names = tuple(node.name for group in groups for node in group.nodes)
    times, moves = np.array(every).reshape(-1, len(names), 2).transpose(2, 0, 1)
    return ModelPoints(names, times, np.where(moves == UNMOVED, np.nan, moves))


class _Choosing:
    """Goes through the choices for the node groups of a model. `kept`: what all nodes need in those that no
    other beats; `least`: what the nodes of the last node groups need at least, of all of them last;
    `looked_at`: assignments, each after those before it. `renew`: how the weights of a node group in an
    assignment are renewed, if the node groups before it have their assignments."""

    def __init__(self, groups: Sequence[NodeGroup], places: PlacesByGroup, renew: Renew):
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
