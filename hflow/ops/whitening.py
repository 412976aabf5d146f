"""Whitening: numbers brought to mean 0 and variance 1 over the whole batch."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from hflow.ops.centring import centred
from hflow.ops.op import op


@op("values: f32[rows, resp~], mask: bool[rows, resp~] -> advantages: f32[rows, resp~]", whole_batch=True)
def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: Annotated[float, Gt(0)] = 1e-8
) -> Tensor:
    """Numbers per token, whitened over all tokens of the batch (PPO for RLHF, arXiv:1909.08593).

        x' = (x - mean) / sqrt(var + eps)        mean and unbiased variance over the mask

    Args:
        values: ``[rows, T]``, all rows of the batch.
        mask: bool ``[rows, T]``, the tokens that count.
        shift_mean: False adds the mean again, so that only the scale changes.

    Returns:
        ``[rows, T]``, 0 outside the mask. Equal numbers become exactly 0 (or their mean).
    """
    whitened = torch.zeros_like(values)
    whitened[mask] = _whiten(values[mask], shift_mean, eps)
    return whitened


@op("score: f32[rows] -> advantages: f32[rows]", whole_batch=True)
def whiten_scores(score: Tensor, *, shift_mean: bool = True, eps: Annotated[float, Gt(0)] = 1e-8) -> Tensor:
    """Numbers per response, whitened over all rows of the batch.

        x' = (x - mean) / sqrt(var + eps)        mean and unbiased variance over the rows

    Every response counts once, however long it is. `whiten` counts tokens, as REINFORCE++ does.

    Args:
        score: ``[rows]``, all rows of the batch: scores, or scores less a baseline.
        shift_mean: False adds the mean again, so that only the scale changes.

    Returns:
        ``[rows]``. Equal numbers become exactly 0 (or their mean).
    """
    return _whiten(score, shift_mean, eps)


def _whiten(x: Tensor, shift_mean: bool, eps: float) -> Tensor:
    """`x` is ``[n]``; fewer than two numbers have no variance: it counts as 0."""
    if not len(x):
        return x
    shifted, mean = centred(x, 0)
    variance = shifted.square().sum() / max(len(x) - 1, 1)
    whitened = shifted / (variance + eps).sqrt()
    return (whitened if shift_mean else whitened + mean).to(x.dtype)
