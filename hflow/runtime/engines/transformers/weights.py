"""A transformers model's weights as boxes of parameters, which are its tensors or, of some families, rows of
them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.file_tensors import file_tensors
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.protocol import ModelWeights


@dataclass(frozen=True)
class _Rows:
    """A parameter of this `shape`: rows of transformers' `whole`, from `start` on."""

    whole: torch.nn.Parameter
    start: int
    shape: tuple[int, ...]


class TransformersWeights(ModelWeights):
    """All weights of a model, which is whole on its device."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.changed, self.version, self.present = False, 0, True
        held, self._places = dict(model.named_parameters()), dict[str, _Rows]()
        for tensor in file_tensors(shape):
            whole, start = held.pop(tensor.name), 0
            for part in tensor.parts:
                self._places[part.name] = _Rows(whole, start, part.shape)
                start += part.shape[0]
        assert not held, f"no HF parameter for {sorted(held)}"
        self._shapes = {place.whole: place.whole.shape for place in self._places.values()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def box(self, name: str) -> Box:
        return tuple((0, size) for size in self._places[name].shape)

    def view(self, name: str, box: Box) -> Tensor:
        if not self.present:
            raise RuntimeError(f"`{name}` is not on this device: its weights were released")
        place, ((first, last), *columns) = self._places[name], box
        rows = (place.start + first, place.start + last)
        return place.whole.data[tuple(slice(*span) for span in (rows, *columns))]

    def allocate(self) -> None:
        if self.present:
            return
        for whole, shape in self._shapes.items():
            whole.data = whole.data.new_empty(shape)
        self.present = True

    def release(self) -> None:
        for whole in self._shapes:
            whole.data = whole.data.new_empty(0)
        self.present = False
