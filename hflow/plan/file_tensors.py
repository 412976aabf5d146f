"""The tensors of a model's Hugging Face files, in which some families hold several parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hflow.plan.families.family import Family
from hflow.plan.families.registry import FAMILIES
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import Parameter, parameters


@dataclass(frozen=True)
class FileTensor:
    """`parts` lie in it one after the other, along its rows; most have one, of the same name."""

    name: str
    parts: tuple[Parameter, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        _, *columns = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *columns)


@lru_cache(maxsize=256)
def file_tensors(shape: ModelShape) -> tuple[FileTensor, ...]:
    """All of them, in the order of the forward pass."""
    found: dict[str, list[Parameter]] = {}
    for parameter in parameters(shape):
        name, _, _ = file_place(FAMILIES[shape.family], parameter.name)
        found.setdefault(name, []).append(parameter)
    return tuple(FileTensor(name, tuple(parts)) for name, parts in found.items())


def file_place(family: Family, parameter: str) -> tuple[str, int, int]:
    """The tensor that holds a parameter, which of the parameters in it this is, and how many these are."""
    module, _, kind = parameter.rpartition(".")
    for fused in family.fused:
        for number, part in enumerate(fused.parts):
            if module.endswith(f".{part}"):
                return f"{module.removesuffix(part)}{fused.module}.{kind}", number, len(fused.parts)
    return parameter, 0, 1
