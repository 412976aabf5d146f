"""Loop-carried scalars: values of a step that later steps recall."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hflow.runtime.rows import Rows


class Carried:
    """The last values, by name; the newest is the last step's."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Rows]] = {}

    def keep(self, name: str, value: Rows, lag: int) -> None:
        """Add a copy of a step's value; those older than `lag` steps are dropped."""
        kept = self._kept.setdefault(name, [])
        kept.append(_copy(value))
        del kept[:-lag]

    def recall(self, name: str, lag: int, init: float) -> Rows:
        """A copy of the value of `lag` steps ago, before this step has kept its own; else `init`.

        Steps and evaluations recall the same value, so none of them gets hold of the kept one.
        """
        kept = self._kept.get(name, ())
        return _copy(kept[-lag]) if lag <= len(kept) else Rows(torch.tensor([init], dtype=torch.float32))

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Every name with what is kept, float32 ``[kept]``, the oldest first."""
        for name, kept in self._kept.items():
            yield name, torch.cat([rows.values.cpu() for rows in kept])

    def restore(self, name: str, values: Tensor) -> None:
        """Set what `values` has told of a name."""
        self._kept[name] = [Rows(value.clone()) for value in values.split(1)]


def _copy(scalar: Rows) -> Rows:
    return Rows(scalar.values.clone())
