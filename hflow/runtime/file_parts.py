"""Parameters as parts of the tensors that a family's files have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from hflow.plan.file_tensors import FilePlace, file_tensors
from hflow.plan.model_shape import ModelShape


def part_of(tensor: Tensor, place: FilePlace, rows: int) -> Tensor:
    """The parameter of so many rows that lies there, as a view."""
    whole = tensor if place.expert is None else tensor[place.expert]
    whole = whole.T if place.transposed else whole
    return whole[place.start : place.start + rows * place.step : place.step]


def joined(shape: ModelShape, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of files of a model by name, each as soon as all of its parameters are there. What is no
    parameter of the model comes as it is."""
    tensors = file_tensors(shape)
    of = {part.name: (tensor, place) for tensor in tensors for part, place in tensor.parts}
    made: dict[str, Tensor] = {}
    missing = {tensor.name: len(tensor.parts) for tensor in tensors}
    for name, values in parameters:
        tensor, place = of.get(name, (None, None))
        if tensor is None or place is None or len(tensor.parts) == 1:
            yield name, values
            continue
        if tensor.name not in made:
            made[tensor.name] = values.new_empty(tensor.shape)
        part_of(made[tensor.name], place, len(values)).copy_(values)
        missing[tensor.name] -= 1
        if not missing[tensor.name]:
            yield tensor.name, made.pop(tensor.name)
    assert not made, f"a part of each of {sorted(made)} is missing"
