"""Parameters joined to the tensors that a family's files have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hflow.plan.families.family import Family
from hflow.plan.file_tensors import file_place


def joined(family: Family, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `family` by name, each as soon as all of its parameters are there."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for parameter, values in parameters:
        name, number, count = file_place(family, parameter)
        parts = waiting.setdefault(name, {})
        parts[number] = values
        if len(parts) == count:
            del waiting[name]
            yield name, values if count == 1 else torch.cat([parts[at] for at in range(count)])
    assert not waiting, f"a part of each of {sorted(waiting)} is missing"
