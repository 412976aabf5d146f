"""A transformers model's weights as boxes of parameters, which are its tensors or parts of them: some
families have several in one, and transformers keeps those of all experts of a layer together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.plan.file_tensors import FilePlace, file_tensors
from hflow.plan.layout import Box
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter
from hflow.runtime.engines.protocol import ModelWeights
from hflow.runtime.file_parts import part_of

_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_GATE, _UP = ("gate_proj", "w1"), ("up_proj", "w3")


@dataclass(frozen=True)
class _PlacedPart:
    """A parameter of this `shape`, which lies at a `place` in transformers' `whole`."""

    whole: torch.nn.Parameter
    place: FilePlace
    shape: tuple[int, ...]

    @property
    def data(self) -> Tensor:
        return part_of(self.whole.data, self.place, self.shape[0])


class TransformersWeights(ModelWeights):
    """All weights of a model, which is whole on its device."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.changed, self.version, self.present = False, 0, True
        held, self._places = dict(model.named_parameters()), dict[str, _PlacedPart]()
        for tensor in file_tensors(shape):
            for part, place in tensor.parts:
                self._places[part.name] = _part(part, tensor.name, place, held)
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
        return self._places[name].data[tuple(slice(*span) for span in box)]

    def allocate(self, keeps_values: bool = False) -> None:
        if self.present:
            return
        assert not keeps_values, "what was released has no values"
        for whole, shape in self._shapes.items():
            whole.data = whole.data.new_empty(shape)
        self.present = True

    def release(self) -> None:
        for whole in self._shapes:
            whole.data = whole.data.new_empty(0)
        self.present = False


def _part(
    part: Parameter, tensor: str, place: FilePlace, held: Mapping[str, torch.nn.Parameter]
) -> _PlacedPart:
    """Where transformers keeps a parameter that lies at a `place` of a `tensor` of files."""
    name = tensor.replace(".block_sparse_moe.", ".mlp.")
    found = _OF_EXPERT.fullmatch(name)
    if found is None or part.expert is None:
        return _PlacedPart(held[name], place, part.shape)
    experts, own = found.groups()
    if own in _GATE + _UP:
        own_place = FilePlace(part.shape[0] if own in _UP else 0, expert=part.expert)
        return _PlacedPart(held[f"{experts}.gate_up_proj"], own_place, part.shape)
    return _PlacedPart(held[f"{experts}.down_proj"], FilePlace(expert=part.expert), part.shape)
