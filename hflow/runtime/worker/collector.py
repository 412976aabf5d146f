"""The rows that a repeat region has kept so far.

All devices of the region hold the same rows and decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hflow.graph.graph import Node, Region
from hflow.runtime.engines.base import NodeError
from hflow.runtime.rows import Rows, concatenate

KEEP = "keep"


class Collector:
    """Collects over the rounds of one step what the region `node` hands out.

    `keep` has one value per prompt; rows that several samples of a prompt fill go with it. Kept prompts stay
    in the order (round, row).
    """

    def __init__(self, node: Node, region: Region):
        self.node, self.region = node, region
        self.rounds = 0
        self._keep: list[Tensor] = []
        self._rows: dict[str, list[Rows]] = {o.port: [] for o in node.outputs}

    @property
    def kept(self) -> int:
        return sum(int(keep.sum()) for keep in self._keep)

    @property
    def drawn(self) -> int:
        return sum(map(len, self._keep))

    @property
    def done(self) -> bool:
        return self.kept >= self.region.rows or self.rounds == self.region.times

    def add(self, inputs: Mapping[str, Rows]) -> None:
        """One round: whole values of `keep` and of all that is handed out."""
        self.rounds += 1
        self._keep.append(inputs[KEEP].values)
        for port, parts in self._rows.items():
            parts.append(inputs[port])

    def collected(self) -> dict[str, Rows]:
        """`region.rows` prompts' rows of every port: the first that were kept and, where these are too few
        and the region may `fill`, the first that were not.

        Raises:
            NodeError: HF408 when there are too few.
        """
        fills = self.node.options["short"] == "fill"
        if (self.drawn if fills else self.kept) < self.region.rows:
            times = f"{self.rounds} round" + "s" * (self.rounds > 1)
            message = f"after {times} {self.kept} of {self.region.rows} rows were kept"
            raise NodeError(self.node.name, f"{message}; {self.drawn} were drawn", "HF408")
        keep = torch.cat(self._keep)
        chosen = _first(keep, self.region.rows)
        spare = _first(~keep, self.region.rows - int(chosen.sum()))
        return {port: _joined(concatenate(parts), chosen, spare) for port, parts in self._rows.items()}


def _first(mask: Tensor, count: int) -> Tensor:
    """`mask` with its first `count` True values only."""
    return mask & (mask.cumsum(0) <= count)


def _joined(rows: Rows, *masks: Tensor) -> Rows:
    """The rows that the first mask chooses, then those of the next; a mask has a value per group of rows."""
    group = len(rows) // len(masks[0])
    return concatenate([_masked(rows, mask.repeat_interleave(group)) for mask in masks])


def _masked(rows: Rows, mask: Tensor) -> Rows:
    return rows.take(mask.nonzero().flatten())
