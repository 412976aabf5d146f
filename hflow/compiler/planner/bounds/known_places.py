"""Bounds of allocations that begin alike, from weights that move: where a trainer and a reader of its weights
lie in two layouts, or on other devices, whatever devices the rest gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.model_fronts import (
    ModelParetoFronts,
    PlacesByGroup,
    TimedAssignment,
    promising,
)
from hflow.compiler.planner.bounds.model_places import ModelPlaces, model_places
from hflow.compiler.planner.bounds.model_points import ModelPoints, models_s
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.bounds.reader_moves import ReaderMoves
from hflow.compiler.planner.bounds.set_places import SetsByNode
from hflow.compiler.planner.effort import BATCH, CHOICES, KNOWN
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.memoize import memoize
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.search_space import Devices

PlacedModel = tuple[Sequence[NodeGroup], PlacesByGroup]  # its node groups, and where they may be


class KnownPlaces:
    """Of one search."""

    def __init__(self, best: Incumbent, least: LeastTimes, fronts: ModelParetoFronts):
        self.best, self.least, self.fronts, self.space = best, least, fronts, least.space
        self.moves = ReaderMoves(best)

    def step_s(self, allocation: Allocation, fixed: int, ungrouped: bool = False) -> float:
        """What no plan takes less than whose first sets, so many, have the counts of `allocation` and whose
        others have as many devices or fewer, or something that is not below the limit. 0 where nothing new is
        known, and as long as there is no limit.

        Args:
            ungrouped: whether the others may share devices.
        """
        if not allocation.partition or not self.best.choice:
            return 0.0
        self.best.effort += KNOWN
        last = allocation.partition[fixed - 1 : fixed] if fixed < len(allocation.partition) else ()
        limits = self.least.limits(allocation, fixed)
        times, sets = self.least.times(allocation, fixed)
        known, placed = list[list[PlacedModel]](), set[str]()
        for groups in self._models():
            places = model_places(self.space, groups, allocation, fixed)
            placed |= {group.name for group in groups if places}
            if places and (not last or any(self.space.part_of(group) in last[0] for group in groups)):
                known.append([(groups, self._timed_places(groups, each, limits)) for each in places])
        models = self._points(known, times, sets)
        moving = self.moves.points(allocation, fixed, limits, ungrouped)
        models += [points for reader, points in moving if reader not in placed]
        self.best.effort += BATCH + sum(map(len, models)) // CHOICES
        return models_s(self.least.bounds, models, times, sets, self.best.limit_s)

    def _models(self) -> list[list[NodeGroup]]:
        """The node groups of models with several, trainers first, as those that read from them need."""
        groups = sorted(self.space.groups, key=lambda group: group.role != "train")
        every = ([g for g in groups if g.model == model] for model in dict.fromkeys(g.model for g in groups))
        return [each for each in every if len(each) > 1]

    def _points(
        self, models: Sequence[Sequence[PlacedModel]], times: Mapping[str, float], sets: SetsByNode
    ) -> list[ModelPoints]:
        """Of each model, in any of the ways in which it may lie."""
        every = list(chain.from_iterable(models))
        some = promising(every, times, lambda taking: self._steps_s(taking, sets), self.best.limit_s)
        points = (self.fronts.of(groups, places) for (groups, _), places in zip(every, some))
        return [ModelPoints.joined(list(islice(points, len(each)))) for each in models]

    def _timed_places(
        self, groups: Sequence[NodeGroup], places: ModelPlaces, limits: Mapping[str, int]
    ) -> PlacesByGroup:
        return {g.name: self._timed(g.name, places[g.name], limits[g.name]) for g in groups}

    def _steps_s(self, taking: Mapping[str, Floats], sets: SetsByNode) -> Floats:
        self.best.effort += BATCH + len(taking[self.least.bounds.nodes[0]]) // CHOICES
        return self.least.bounds.steps_s(taking, sets, {}, self.best.limit_s, depth=0)

    @memoize
    def _timed(self, name: str, devices: Devices, limit_bytes: int) -> list[TimedAssignment]:
        """The assignments of a node group, the fastest first, in which all its nodes run if it may fill so
        many bytes."""
        found: list[TimedAssignment] = []
        for candidate in self.space.candidates(name, len(devices)):
            configs = [front.fastest(limit_bytes - candidate.idle_bytes) for front in candidate.fronts]
            times = tuple(config.time_s + candidate.swap_s for config in configs if config)
            if len(times) == len(configs):
                assignment = Assignment(candidate, devices[: candidate.num_devices], ())
                found.append(TimedAssignment(assignment, times))
        return sorted(found, key=lambda place: sum(place.times))
