"""Losses per response: the whole sequence is one action."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from hflow.ops.log_ratio import beyond, bounded
from hflow.ops.op import op


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, advantages: f32[rows], "
    "mask: bool[rows, resp~] -> loss: f32[rows], clip_fraction: f32[rows]"
)
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: Annotated[float, Ge(0)] = 3e-4,
    clip_high: Annotated[float, Ge(0)] = 4e-4,
) -> tuple[Tensor, Tensor]:
    """PPO's surrogate with one ratio per response, its tokens' geometric mean (GSPO, arXiv:2507.18071).

        s = exp(mean over the mask of (logprobs - old_logprobs)),   the mean held within +-20
        loss = -min(s A, clamp(s, 1 - clip, 1 + clip_high) A)

    Args:
        logprobs, old_logprobs: ``[rows, T]``, right-padded.
        advantages: ``[rows]``.
        mask: bool ``[rows, T]``, tokens to learn from.

    Returns:
        Loss and whether clipping, or the bound of the mean, held the gradient back (1 or 0), each ``[rows]``.
        Both are 0 for a response without tokens.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)
    ratio = bounded(log_ratio).exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip_high) * advantages
    loss = -torch.minimum(plain, clipped).masked_fill(~mask.any(1), 0)
    return loss, ((clipped < plain) | (beyond(log_ratio) & (advantages != 0))).to(loss.dtype)
