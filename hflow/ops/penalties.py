"""Scores of a response's length."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.ops.op import op


@op("mask: bool[rows, resp~] -> score: f32[rows]")
def length_penalty(mask: Tensor, *, per_token: float, free_tokens: int = 0) -> Tensor:
    """A price per token beyond the free ones.

        score = -per_token * max(n - free_tokens, 0)

    Args:
        mask: bool ``[rows, T]``; n is the number of a row's tokens in it.

    Returns:
        float32 ``[rows]``.
    """
    return per_token * (free_tokens - mask.sum(1)).clamp(max=0).to(torch.float32)
