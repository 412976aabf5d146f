"""Loop-carried scalars, and rows: values of a step that later steps recall."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hflow.graph.ir import Node
from hflow.plan.layout import Mesh
from hflow.plan.ports import output_layout
from hflow.runtime.rows import TORCH_DTYPES, Rows


class Carried:
    """The last values, by name; the newest is the last step's."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Rows]] = {}

    def keep(self, name: str, value: Rows, lag: int) -> None:
        """Add a copy of a step's value; those older than `lag` steps are dropped."""
        kept = self._kept.setdefault(name, [])
        kept.append(_copy(value))
        del kept[:-lag]

    def recall(self, name: str, lag: int, initial: Rows) -> Rows:
        """A copy of the value of `lag` steps ago, before this step has kept its own; else `initial`.

        Steps and evaluations recall the same value, so none of them gets hold of the kept one.
        """
        kept = self._kept.get(name, ())
        return _copy(kept[-lag]) if lag <= len(kept) else initial

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Every name with what is kept, ``[kept]`` or ``[kept * rows]``, the oldest first."""
        for name, kept in self._kept.items():
            yield name, torch.cat([rows.values.cpu() for rows in kept])

    def restore(self, name: str, values: Tensor) -> None:
        """Set what `values` has told of a name, ``[kept]`` or ``[kept, rows]``."""
        self._kept[name] = [Rows(value.clone()) for value in values.reshape(len(values), -1)]


def initial_value(node: Node, port: str, mesh: Mesh, rank: int, init: float) -> Rows | None:
    """What a device has of a value in the steps that have none before them; None if it never has any."""
    type_ = node.type_of(port)
    boxes = output_layout(node, mesh, type_).boxes((type_.rows,))
    if rank not in boxes:
        return None
    start, stop = boxes[rank][0]
    return Rows(torch.full((stop - start,), init, dtype=TORCH_DTYPES[type_.dtype]))


def _copy(value: Rows) -> Rows:
    return Rows(value.values.clone())
