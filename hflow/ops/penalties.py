"""Scores of a response's length."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from hflow.ops.op import op


@op("mask: bool[rows, resp~] -> score: f32[rows]")
def overlong_penalty(
    mask: Tensor, *, max_tokens: Annotated[int, Ge(1)], buffer_tokens: Annotated[int, Ge(1)]
) -> Tensor:
    """From 0 down to -1 over the last tokens before the limit (DAPO, arXiv:2503.14476, equation 13).

        score = 0                                               for n <= max_tokens - buffer_tokens
                (max_tokens - buffer_tokens - n) / buffer_tokens    up to max_tokens
                -1                                                  beyond

    Args:
        mask: bool ``[rows, T]``; n is the number of a row's tokens in it.

    Returns:
        float32 ``[rows]``.

    Raises:
        ValueError: `buffer_tokens` is not in 1..`max_tokens`.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; it is in 1..max_tokens, here {max_tokens}")
    excess = mask.sum(1) - (max_tokens - buffer_tokens)
    return (-excess / buffer_tokens).clamp(-1, 0)


@op("mask: bool[rows, resp~] -> score: f32[rows]")
def length_penalty(mask: Tensor, *, per_token: float, free_tokens: Annotated[int, Ge(0)] = 0) -> Tensor:
    """A price per token beyond the free ones.

        score = -per_token * max(n - free_tokens, 0)

    Args:
        mask: bool ``[rows, T]``; n is the number of a row's tokens in it.

    Returns:
        float32 ``[rows]``.
    """
    return per_token * (free_tokens - mask.sum(1)).clamp(max=0).to(torch.float32)
