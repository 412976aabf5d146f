"""The tensors of a model's Hugging Face files, in which some families hold several parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hflow.plan.families.family import Family
from hflow.plan.families.registry import FAMILIES
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import GATE_UP_DOWN, Parameter, parameters


@dataclass(frozen=True)
class FilePlace:
    """Where a parameter lies in a tensor of files: its rows are rows ``start``, ``start + step``, … of the
    tensor, or of its part for an `expert`; with `transposed` of what is stored there with rows as columns."""

    start: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False


WHOLE = FilePlace()


@dataclass(frozen=True)
class FileTensor:
    """`parts`: the parameters in it, and where each lies; most have one, of the same name."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Parameter, FilePlace], ...]

    @property
    def stacked(self) -> bool:
        """Whether it is a matrix of each expert of a layer."""
        return len(self.shape) == 3


@lru_cache(maxsize=256)
def file_tensors(shape: ModelShape) -> tuple[FileTensor, ...]:
    """All of them, in the order of the forward pass."""
    family, found = FAMILIES[shape.family], dict[str, list[Parameter]]()
    for parameter in parameters(shape):
        found.setdefault(_tensor_of(family, parameter), []).append(parameter)
    return tuple(_file_tensor(name, parts) for name, parts in found.items())


def _tensor_of(family: Family, parameter: Parameter) -> str:
    """The name of the tensor that holds a parameter."""
    module, _, kind = parameter.name.rpartition(".")
    if family.stacked_experts and parameter.expert is not None:
        experts, projection = module.rsplit(f".{parameter.expert}.", 1)
        matrix = "down_proj" if projection == GATE_UP_DOWN[2] else "gate_up_proj"
        return f"{experts}.{matrix}" + ("_bias" if kind == "bias" else "")
    for fused in family.fused:
        part = next((part for part in fused.parts if module.endswith(f".{part}")), "")
        if part:
            return f"{module.removesuffix(part)}{fused.module}.{kind}"
    return parameter.name


def _file_tensor(name: str, parts: list[Parameter]) -> FileTensor:
    if parts[0].expert is not None and len(parts) > 1:
        return _stacked(name, parts)
    _, *columns = parts[0].shape
    return FileTensor(name, (sum(p.shape[0] for p in parts), *columns), tuple(_one_after_another(parts)))


def _one_after_another(parts: list[Parameter]) -> Iterator[tuple[Parameter, FilePlace]]:
    start = 0
    for part in parts:
        yield part, FilePlace(start)
        start += part.shape[0]


def _stacked(name: str, parts: list[Parameter]) -> FileTensor:
    """Of all experts: ``[experts, columns, rows]`` of a matrix, ``[experts, rows]`` of a bias."""
    experts = len({part.expert for part in parts})
    step, (rows, *columns) = len(parts) // experts, parts[0].shape
    places = (FilePlace(number % step, step, p.expert, bool(columns)) for number, p in enumerate(parts))
    return FileTensor(name, (experts, *columns, step * rows), tuple(zip(parts, places, strict=True)))
