"""The float32 weights and Adam's moments of a trained model, as boxes of HF parameters.

The optimizer keeps them for elements [start, stop) of a Megatron parameter: for all, or where it is split
over data-parallel ranks (ZeRO-1) for a range that begins and ends within a row. Row by row, an HF parameter's
elements lie in a Megatron parameter in the same order, so such a range is at most three boxes of it: the end
of a row, whole rows, and the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from hflow.plan.layout import Box, intersect
from hflow.plan.run_state import TRAINED, TrainedKind
from hflow.runtime.engines.megatron.optimizer import Adam
from hflow.runtime.engines.megatron.weights import MegatronWeights, ParameterPlace
from hflow.runtime.engines.protocol import TrainingState


class MegatronTrainingState(TrainingState):
    """See `TrainingState`."""

    def __init__(self, weights: MegatronWeights, adam: Adam):
        self.weights, self.adam = weights, adam

    @property
    def updates(self) -> int:
        return self.adam.updates

    def parts(self, kind: TrainedKind, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """See `TrainingState.parts`."""
        if name not in self.weights.places:
            return
        place = self.weights.places[name]
        kept, start = self.adam.kept(place.parameter, kind)
        for own in _boxes(place, start, start + len(kept)):
            common = intersect(own, box)
            if common is None:
                continue
            values = torch.empty([b - a for a, b in common], dtype=torch.float32)
            for mine, there in _runs(place, common, values, kept, start):
                mine.copy_(there)
            yield common, values

    def restore(self, read: Callable[[TrainedKind, str, Box], Tensor], updates: int) -> None:
        """See `TrainingState.restore`."""
        was_present = self.adam.present
        self.adam.onload()
        moved = ((n, place) for n, place in self.weights.places.items() if n in self.weights.moved)
        for name, place in moved:
            self.weights.write(name, place.box, read("weights", name, place.box))
            for kind in TRAINED if place.parameter.requires_grad else ():
                kept, start = self.adam.kept(place.parameter, kind)
                for box in _boxes(place, start, start + len(kept)):
                    for mine, there in _runs(place, box, read(kind, name, box), kept, start):
                        there.copy_(mine)
        self.weights.changed = False  # the float32 copies are not to be made of them: these were restored
        self.adam.updates = updates
        if not was_present:
            self.adam.offload()


def _boxes(place: ParameterPlace, start: int, stop: int) -> Iterator[Box]:
    """The parts (global indices) of an HF parameter that are among elements [start, stop) of the Megatron
    parameter that holds it."""
    first, last = (_elements_before(place, element) for element in (start, stop))
    width, (row, *columns) = _width(place), place.box
    while first < last:
        at, column = divmod(first, width)
        rows = 1 if column else max(1, (last - first) // width)
        end = min(last - first, rows * width - column)
        spans = [(row[0] + at, row[0] + at + rows)]
        if columns and rows == 1:
            base = columns[0][0] + column
            yield (*spans, (base, base + end))
        else:
            yield (*spans, *columns)
        first += end


def _elements_before(place: ParameterPlace, element: int) -> int:
    """How many elements of the part held lie before `element` of the Megatron parameter."""
    width, (top, bottom) = _width(place), place.box[0]
    row, rest = divmod(element, width)
    rows = min(_rows_before(place, row), bottom - top)
    is_inside = rows < bottom - top and _row(place, rows) == row
    return rows * width + (rest if is_inside else 0)


def _rows_before(place: ParameterPlace, row: int) -> int:
    """How many rows of the part held lie before a row of the Megatron parameter, as if their runs never
    ended."""
    after = max(0, row - place.start)
    if not place.stride:
        return after
    runs, rest = divmod(after, place.stride)
    return runs * place.run + min(rest, place.run)


def _row(place: ParameterPlace, row: int) -> int:
    """The row of the Megatron parameter where row `row` of the part held lies."""
    return place.start + row // place.run * place.stride + row % place.run


def _width(place: ParameterPlace) -> int:
    return prod(stop - start for start, stop in place.box[1:])


def _runs(
    place: ParameterPlace, box: Box, values: Tensor, kept: Tensor, start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """`box` (global indices) in pieces that lie together: their places in `values`, which has the shape of
    the box, and in `kept`, which begins with element `start` of the Megatron parameter."""
    width, (top, _) = _width(place), place.box[0]
    column = box[1][0] - place.box[1][0] if box[1:] else 0
    first, last = (row - top for row in box[0])
    for row in _run_starts(place, first, last):
        rows = min(last - row, place.run - row % place.run)
        mine = values[row - first : row - first + rows]
        at = _row(place, row) * width + column - start
        yield mine.reshape(-1), kept[at : at + mine.numel()]


def _run_starts(place: ParameterPlace, first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first += place.run - first % place.run
