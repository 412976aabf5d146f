"""The rows that a repeat region has kept so far.

All devices of the region hold the same rows and decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.graph.ir import Node, Region
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows, concatenate

KEEP = "keep"


@dataclass(frozen=True)
class Surplus:
    """Kept prompts that no step has taken, oldest first: their rows by port, and for how many steps each has
    waited, int64 ``[prompts]``."""

    rows: Mapping[str, Rows]
    waited: Tensor

    def __len__(self) -> int:
        return len(self.waited)

    def younger(self, most_steps: int) -> Surplus:
        """In the next step: without those that would have waited for more."""
        waited = self.waited + 1
        mask = waited <= most_steps
        return Surplus({port: _joined(rows, mask) for port, rows in self.rows.items()}, waited[mask])


class Collector:
    """Collects over the rounds of one step what the region `node` hands out.

    `keep` has one value per prompt; rows that several samples of a prompt fill go with it. Kept prompts stay
    in the order (round, row), after those that `before` has left.
    """

    def __init__(self, node: Node, region: Region, before: Surplus | None = None):
        self.node, self.region = node, region
        self.rounds = 0
        self.waiting = len(before) if before else 0
        self._keep: list[Tensor] = []
        self._waited: list[Tensor] = []
        self._rows: dict[str, list[Rows]] = {o.port: [] for o in node.outputs}
        if before and self.waiting:
            self._append(torch.ones(self.waiting, dtype=torch.bool), before.waited, before.rows)

    @property
    def kept(self) -> int:
        """Those of earlier steps included."""
        return sum(int(keep.sum()) for keep in self._keep)

    @property
    def drawn(self) -> int:
        """Those of earlier steps included."""
        return sum(map(len, self._keep))

    @property
    def done(self) -> bool:
        return self.kept >= self.region.rows or self.rounds == self.region.times

    def add(self, inputs: Mapping[str, Rows]) -> None:
        """One round: whole values of `keep` and of all that is handed out."""
        self.rounds += 1
        keep = inputs[KEEP].values
        self._append(keep, torch.zeros(len(keep), dtype=torch.int64), inputs)

    def collected(self) -> dict[str, Rows]:
        """`region.rows` prompts' rows of every port: the first that were kept and, where these are too few
        and the region may `fill`, the first that were not.

        Raises:
            NodeError: HF408 when there are too few.
        """
        fills = self.node.options["short"] == "fill"
        if (self.drawn if fills else self.kept) < self.region.rows:
            times = f"{self.rounds} round" + "s" * (self.rounds != 1)
            message = f"after {times} {self.kept} of {self.region.rows} rows were kept"
            raise NodeError(self.node.name, f"{message}; {self.drawn} were drawn", "HF408")
        keep = torch.cat(self._keep)
        chosen = _first(keep, self.region.rows)
        spare = _first(~keep, self.region.rows - int(chosen.sum()))
        return {port: _joined(concatenate(parts), chosen, spare) for port, parts in self._rows.items()}

    def surplus(self) -> Surplus:
        """What was kept beyond that."""
        keep = torch.cat(self._keep)
        left = keep & ~_first(keep, self.region.rows)
        rows = {port: _joined(concatenate(parts), left) for port, parts in self._rows.items()}
        return Surplus(rows, torch.cat(self._waited)[left])

    def _append(self, keep: Tensor, waited: Tensor, rows: Mapping[str, Rows]) -> None:
        self._keep.append(keep)
        self._waited.append(waited)
        for port, parts in self._rows.items():
            parts.append(rows[port])


def _first(mask: Tensor, count: int) -> Tensor:
    """`mask` with its first `count` True values only."""
    return mask & (mask.cumsum(0) <= count)


def _joined(rows: Rows, *masks: Tensor) -> Rows:
    """The rows that the first mask chooses, then those of the next; a mask has a value per group of rows."""
    group = len(rows) // max(1, len(masks[0]))
    return concatenate([_masked(rows, mask.repeat_interleave(group)) for mask in masks])


def _masked(rows: Rows, mask: Tensor) -> Rows:
    return rows.take(mask.nonzero().flatten())
