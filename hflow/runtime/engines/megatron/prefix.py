"""Keys and values of prompts, which all rows that continue a prompt share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Prefix:
    """What stands before a row's own tokens.

    Attributes:
        layers: of each its keys and its values, ``[prompts, kv_heads / tp, places, d]``.
        present: bool ``[prompts, places]``, False where there is padding; None: nowhere.
        of: int64 ``[rows]``, the prompt that a row continues.
        order: int64 ``[rows]``: all rows, those of a prompt after each other.
    """

    layers: list[tuple[Tensor, Tensor]]
    present: Tensor | None
    of: Tensor
    order: Tensor

    @staticmethod
    def shared(layers: list[tuple[Tensor, Tensor]], present: Tensor | None, of: Tensor) -> Prefix:
        """Of rows that continue the prompts `of`."""
        return Prefix(layers, present, of, torch.argsort(of))

    @property
    def places(self) -> int:
        return self.layers[0][0].shape[2]

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows (int64)."""
        self.of = self.of[rows]
        self.order = torch.argsort(self.of)
