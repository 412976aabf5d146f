"""What is made of each prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows


@dataclass(frozen=True)
class Responses:
    """`tokens`: int64, `log_probs`: float32, both ``[rows, max_new_tokens]``; `lengths`: int64 ``[rows]``.

    What lies after a row's length is undefined. `kept`, with `max_kept`: the sets of tokens that truncation
    left, and which rows have overflown. `routes`: of prompts and responses, as `hflow.runtime.routes` says.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    kept: tuple[KeptSets, Tensor] | None = None
    routes: Rows | None = None

    @staticmethod
    def to_fill(rows: int, length: int, device: torch.device) -> Responses:
        """Of rows that have not ended: as long as they may be."""
        return Responses(
            torch.zeros(rows, length, dtype=torch.int64, device=device),
            torch.zeros(rows, length, device=device),
            torch.full((rows,), length, device=device),
        )
