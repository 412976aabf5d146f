"""What a step takes at least in which each of some models keeps one of a few points: all times of its nodes,
with the weights that then move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.numbers import Floats, known
from hflow.compiler.planner.bounds.recurrence import Places


@dataclass(frozen=True)
class ModelPoints:
    """Of a model (P points): the seconds of its `nodes`, `times` [P, N], and those that weights move to them,
    `moves` [P, N], NaN where none do."""

    nodes: tuple[str, ...]
    times: Floats
    moves: Floats

    def __len__(self) -> int:
        return len(self.times)

    @staticmethod
    def joined(parts: Sequence[ModelPoints]) -> ModelPoints:
        """The points of all parts, one at least, which are of the same nodes."""
        times, moves = (np.concatenate(each) for each in zip(*((p.times, p.moves) for p in parts)))
        return ModelPoints(parts[0].nodes, times, moves)


def models_s(
    bounds: Bounds,
    models: Sequence[ModelPoints],
    times: Mapping[str, float],
    places: Places,
    enough_s: float,
) -> float:
    """No step takes less in which each of `models` keeps one of its points and all other nodes take the least
    `times`; or something that is not below `enough_s`. Infinite where a model has no points."""
    if not all(map(len, models)):
        return float("inf")
    busiest_s = _busiest_s(bounds, models, times, places)
    if busiest_s >= enough_s or not models:
        return busiest_s
    ends = np.cumsum([len(points) for points in models])
    lasting = np.tile(np.array([[times[name]] for name in bounds.nodes]), ends[-1])
    moving = np.full(lasting.shape, np.nan)
    for points, end in zip(models, ends):
        rows, some = [bounds.row[name] for name in points.nodes], slice(end - len(points), end)
        lasting[rows, some], moving[rows, some] = points.times.T, points.moves.T
    moves = {bounds.nodes[row]: moving[row] for row in np.flatnonzero(~np.isnan(moving).all(axis=1))}
    found = bounds.steps_s(dict(zip(bounds.nodes, lasting)), places, moves, enough_s, depth=0)
    return max(busiest_s, *(float(each.min()) for each in np.split(found, ends[:-1])))


def _busiest_s(
    bounds: Bounds, models: Sequence[ModelPoints], times: Mapping[str, float], places: Places
) -> float:
    """What the busiest set of devices does, if each model has the point that is best for that set."""
    least, placed = np.array([times[name] for name in bounds.nodes]), bounds.placed(places)
    if not np.isfinite(least).all():
        return float("inf")
    busy = (least * bounds.counts + bounds.calls) @ placed.on
    for points in models:
        rows = [bounds.row[name] for name in points.nodes]
        more = (points.times - least[rows]) * bounds.counts[rows]
        busy += (more @ placed.on[rows] + known(points.moves) @ placed.joined[rows]).min(axis=0)
    return float(busy.max(initial=0.0))
