"""Bounds of allocations that begin alike, from weights that move: where a trainer and a reader of its weights
lie in two layouts, or on other devices, whatever devices the rest gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.memory_stairs import NEVER
from hflow.compiler.planner.bounds.model_fronts import (
    ModelParetoFronts,
    ModelPoint,
    TimedAssignment,
    promising,
)
from hflow.compiler.planner.bounds.model_places import ModelPlaces, model_places
from hflow.compiler.planner.bounds.numbers import Floats
from hflow.compiler.planner.bounds.reader_moves import ReaderMoves
from hflow.compiler.planner.bounds.set_places import SetsByNode
from hflow.compiler.planner.effort import BATCH, CHOICES, KNOWN
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.search_space import Devices


class KnownPlaces:
    """Of one search."""

    def __init__(self, best: Incumbent, least: LeastTimes, fronts: ModelParetoFronts):
        self.best, self.least, self.fronts, self.space = best, least, fronts, least.space
        self.moves = ReaderMoves(best)

    def step_s(self, allocation: Allocation, fixed: int) -> float:
        """What no plan takes less than whose first sets, so many, have the counts of `allocation` and whose
        others have as many devices or fewer, or something that is not below the limit. 0 where nothing new is
        known, and as long as there is no limit."""
        if not allocation.partition or not self.best.choice:
            return 0.0
        self.best.effort += KNOWN
        last = allocation.partition[fixed - 1 : fixed] if fixed < len(allocation.partition) else ()
        limits = self.least.limits(allocation, fixed)
        times, sets = self.least.times(allocation, fixed)
        best_s, placed = 0.0, set[str]()
        for groups in self._models():
            places = model_places(self.space, groups, allocation, fixed)
            placed |= {group.name for group in groups if places}
            if places and (not last or any(self.space.part_of(group) in last[0] for group in groups)):
                points = chain.from_iterable(self._points(groups, p, limits, times, sets) for p in places)
                best_s = max(best_s, self._least_s(list(points), times, sets))
        for reader, points in self.moves.points(allocation, fixed, limits):
            if reader not in placed and best_s < self.best.limit_s:
                best_s = max(best_s, self._least_s(points, times, sets))
        return best_s

    def _models(self) -> list[list[NodeGroup]]:
        """The node groups of models with several, trainers first, as those that read from them need."""
        groups = sorted(self.space.groups, key=lambda group: group.role != "train")
        every = ([g for g in groups if g.model == model] for model in dict.fromkeys(g.model for g in groups))
        return [each for each in every if len(each) > 1]

    def _points(
        self,
        groups: Sequence[NodeGroup],
        places: ModelPlaces,
        limits: Mapping[str, int],
        times: Mapping[str, float],
        sets: SetsByNode,
    ) -> list[ModelPoint]:
        timed = {group.name: self._timed(group, places[group.name], limits[group.name]) for group in groups}
        some = promising(groups, timed, times, lambda taking: self._steps_s(taking, sets), self.best.limit_s)
        return self.fronts.of(groups, some)

    def _least_s(self, points: Sequence[ModelPoint], times: Mapping[str, float], sets: SetsByNode) -> float:
        """Of one model in any of its points, and of all others at their least times."""
        if not points:
            return NEVER
        every = [{**times, **point.times} for point in points]
        taking = {name: np.array([each[name] for each in every]) for name in self.least.bounds.nodes}
        readers = dict.fromkeys(reader for point in points for reader in point.moves)
        moves = {reader: np.array([p.moves.get(reader, np.nan) for p in points]) for reader in readers}
        return float(self._steps_s(taking, sets, moves).min())

    def _steps_s(
        self,
        taking: Mapping[str, Floats],
        sets: SetsByNode,
        moves: Mapping[str, Floats] = MappingProxyType({}),
    ) -> Floats:
        self.best.effort += BATCH + len(taking[self.least.bounds.nodes[0]]) // CHOICES
        return self.least.bounds.steps_s(taking, sets, moves, self.best.limit_s, depth=0)

    def _timed(self, group: NodeGroup, devices: Devices, limit_bytes: int) -> list[TimedAssignment]:
        """Its assignments, the fastest first, in which all its nodes run if it may fill so many bytes."""
        found: list[TimedAssignment] = []
        for candidate in self.space.candidates(group.name, len(devices)):
            configs = [front.fastest(limit_bytes - candidate.idle_bytes) for front in candidate.fronts]
            times = tuple(config.time_s + candidate.swap_s for config in configs if config)
            if len(times) == len(configs):
                assignment = Assignment(candidate, devices[: candidate.num_devices], ())
                found.append(TimedAssignment(assignment, times))
        return sorted(found, key=lambda place: sum(place.times))
