"""Losses per response token. The engine weights and sums them (`hflow.ops.aggregate`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.ops.op import op


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<behaviour>, advantages: f32[rows], "
    "mask: bool[rows, resp~], ref_logprobs?: f32[rows, resp~]<scored> "
    "-> loss: f32[rows, resp~], kl: f32[rows, resp~], clip_fraction: f32[rows, resp~]"
)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    clip: float = 0.2,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate (PPO, arXiv:1707.06347), with a penalty for leaving the reference (GRPO).

        r = exp(logprobs - old_logprobs)
        loss = -min(r A, clamp(r, 1 - clip, 1 + clip) A) + kl_coef * kl
        kl = exp(d) - d - 1,   d = ref_logprobs - logprobs

    kl is the k3 estimate (http://joschu.net/blog/kl-approx.html) of KL(trained || reference) from samples
    of the trained model; without a reference it is measured, not penalised, against the behaviour policy.

    Args:
        logprobs, old_logprobs, ref_logprobs: ``[rows, T]``, right-padded.
        advantages: ``[rows]``, one per response.
        mask: bool ``[rows, T]``, tokens to learn from; elsewhere all outputs are 0 or without effect.

    Returns:
        Loss, kl and whether the ratio was clipped (1 or 0), each ``[rows, T]``.

    Raises:
        ValueError: `kl_coef` > 0 without `ref_logprobs`.
    """
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef > 0 needs ref_logprobs: connect the log-probs of a reference model")
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0).exp()
    advantage = advantages[:, None]
    plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    loss = -torch.minimum(plain, clipped).masked_fill(~mask, 0)
    other = old_logprobs if ref_logprobs is None else ref_logprobs
    log_ratio = (other - logprobs).masked_fill(~mask, 0)
    kl = log_ratio.exp() - log_ratio - 1
    if kl_coef > 0:
        loss = loss + kl_coef * kl
    return loss, kl, ((clipped < plain) & mask).to(loss.dtype)


@op("logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: f32[rows, resp~]")
def negative_log_likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """-log p(token): supervised fine-tuning on the given responses.

    Args:
        logprobs: ``[rows, T]``, right-padded.
        mask: bool ``[rows, T]``, tokens to learn from.

    Returns:
        ``[rows, T]``, 0 outside the mask.
    """
    return -logprobs.masked_fill(~mask, 0)
