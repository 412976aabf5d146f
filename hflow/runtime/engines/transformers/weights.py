"""A transformers model's weights as boxes of HF parameters.

They have the names and shapes of files already, but for those of experts: transformers keeps all of a layer's
in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter, parameters
from hflow.runtime.engines.protocol import ModelWeights

_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_GATE, _UP = ("gate_proj", "w1"), ("up_proj", "w3")


@dataclass(frozen=True)
class _Stored:
    """`parameter`: what holds an HF parameter, of its shape; or, of an `expert`, that of all experts, where
    its rows begin at `first`."""

    parameter: torch.nn.Parameter
    expert: int | None = None
    first: int = 0

    def rows(self, count: int) -> Tensor:
        data = self.parameter.data
        return data if self.expert is None else data[self.expert, self.first : self.first + count]


class TransformersWeights(ModelWeights):
    """All weights of a model, which is whole on its device."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.changed, self.version, self.present = False, 0, True
        held = dict(model.named_parameters())
        self._shapes = {p.name: p.shape for p in parameters(shape)}
        self._stored = {p.name: _stored(p, held) for p in parameters(shape)}
        self._parameters = {stored.parameter: stored.parameter.shape for stored in self._stored.values()}
        missing = [name for name, parameter in held.items() if parameter not in self._parameters]
        assert not missing, f"no HF parameter for {missing}"

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def box(self, name: str) -> Box:
        return tuple((0, size) for size in self._shapes[name])

    def view(self, name: str, box: Box) -> Tensor:
        if not self.present:
            raise RuntimeError(f"`{name}` is not on this device: its weights were released")
        rows = self._stored[name].rows(self._shapes[name][0])
        return rows[tuple(slice(*span) for span in box)]

    def allocate(self) -> None:
        if self.present:
            return
        for parameter, shape in self._parameters.items():
            parameter.data = parameter.data.new_empty(shape)
        self.present = True

    def release(self) -> None:
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        self.present = False


def _stored(parameter: Parameter, held: Mapping[str, torch.nn.Parameter]) -> _Stored:
    name = parameter.name.replace(".block_sparse_moe.", ".mlp.")
    found = _OF_EXPERT.fullmatch(name)
    if found is None or parameter.expert is None:
        return _Stored(held[name])
    experts, own = found.groups()
    if own in _GATE + _UP:
        first = parameter.shape[0] if own in _UP else 0
        return _Stored(held[f"{experts}.gate_up_proj"], parameter.expert, first)
    return _Stored(held[f"{experts}.down_proj"], parameter.expert)
