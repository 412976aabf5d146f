"""A transformers model's weights as boxes of parameters, which are its tensors or rows of them: some families
have several in one, and transformers keeps those of all experts of a layer together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.file_tensors import file_tensors
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter
from hflow.runtime.engines.protocol import ModelWeights

_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_GATE, _UP = ("gate_proj", "w1"), ("up_proj", "w3")


@dataclass(frozen=True)
class _Rows:
    """A parameter of this `shape`: rows from `start` on of transformers' `whole`, or of its part for an
    `expert`."""

    whole: torch.nn.Parameter
    start: int
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def data(self) -> Tensor:
        return self.whole.data if self.expert is None else self.whole.data[self.expert]


class TransformersWeights(ModelWeights):
    """All weights of a model, which is whole on its device."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.changed, self.version, self.present = False, 0, True
        held, self._places = dict(model.named_parameters()), dict[str, _Rows]()
        for tensor in file_tensors(shape):
            start = 0
            for part in tensor.parts:
                self._places[part.name] = _rows(part, tensor.name, start, held)
                start += part.shape[0]
        self._shapes = {place.whole: place.whole.shape for place in self._places.values()}
        missing = [name for name, parameter in held.items() if parameter not in self._shapes]
        assert not missing, f"no HF parameter for {missing}"

    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def box(self, name: str) -> Box:
        return tuple((0, size) for size in self._places[name].shape)

    def view(self, name: str, box: Box) -> Tensor:
        if not self.present:
            raise RuntimeError(f"`{name}` is not on this device: its weights were released")
        place, ((first, last), *columns) = self._places[name], box
        rows = (place.start + first, place.start + last)
        return place.data[tuple(slice(*span) for span in (rows, *columns))]

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


def _rows(part: Parameter, tensor: str, start: int, held: Mapping[str, torch.nn.Parameter]) -> _Rows:
    """Where transformers keeps a parameter that begins with row `start` of a `tensor` of files."""
    name = tensor.replace(".block_sparse_moe.", ".mlp.")
    found = _OF_EXPERT.fullmatch(name)
    if found is None or part.expert is None:
        return _Rows(held[name], start, part.shape)
    experts, own = found.groups()
    if own in _GATE + _UP:
        first = part.shape[0] if own in _UP else 0
        return _Rows(held[f"{experts}.gate_up_proj"], first, part.shape, part.expert)
    return _Rows(held[f"{experts}.down_proj"], 0, part.shape, part.expert)
