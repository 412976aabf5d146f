"""A moving average of the weights of a model that is trained here, for a frozen model that takes it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hflow.graph.ir import Model
from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.megatron.load import load_safetensors
from hflow.runtime.engines.megatron.weights import MegatronWeights, PlacedWeights


class MovingAverage(PlacedWeights):
    """decay * average + (1 - decay) * weights, in float32, which begins with the weights in the folder of the
    model that takes it over. The weights that come in are those that others read, of the model's dtype."""

    def __init__(self, weights: MegatronWeights, model: Model, shape: ModelShape):
        """Raises HflowError HF406 when the weights of `model` cannot be read."""
        assert model.refresh
        self.decay, self._weights, self._step = model.refresh.decay, weights, -1
        trained = dict.fromkeys(place.parameter for place in weights.places.values())
        self._averages = {
            p: torch.nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False)
            for p in trained
        }
        super().__init__(
            {name: replace(p, parameter=self._averages[p.parameter]) for name, p in weights.places.items()}
        )
        load_safetensors(self, model, shape)

    def advance(self, step: int) -> None:
        """See `AveragedWeights`. Several readers may ask for it in one step."""
        if step == self._step:
            return
        assert self._weights.present, "an average was asked for while the weights are away"
        for parameter, average in self._averages.items():
            average.data.lerp_(parameter.detach().float(), 1 - self.decay)
        self._step, self.version = step, self._weights.version


def moving_averages(
    weights: MegatronWeights, models: Sequence[Model], shape: ModelShape
) -> dict[str, MovingAverage]:
    """By the names of the models that take them over."""
    return {model.name: MovingAverage(weights, model, shape) for model in models}
