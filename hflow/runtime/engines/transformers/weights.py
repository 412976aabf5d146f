"""A transformers model's weights as boxes of HF parameters: they have these names and shapes already."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters
from hflow.runtime.engines.protocol import ModelWeights


class TransformersWeights(ModelWeights):
    """All weights of a model, which is whole on its device."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.changed, self.version, self.present = False, 0, True
        held, self._shapes = dict(model.named_parameters()), {p.name: p.shape for p in parameters(shape)}
        self._parameters = {name: held.pop(name) for name in self._shapes}
        assert not held, f"no HF parameter for {sorted(held)}"

    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def box(self, name: str) -> Box:
        return tuple((0, size) for size in self._shapes[name])

    def view(self, name: str, box: Box) -> Tensor:
        if not self.present:
            raise RuntimeError(f"`{name}` is not on this device: its weights were released")
        return self._parameters[name].data[tuple(slice(*span) for span in box)]

    def allocate(self) -> None:
        if self.present:
            return
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.new_empty(self._shapes[name])
        self.present = True

    def release(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self.present = False
