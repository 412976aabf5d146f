"""Losses per response token that raise or lower log-probs.

The engine weights and sums them (`hflow.ops.aggregate`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from hflow.ops.kl import estimate
from hflow.ops.log_ratio import beyond, bounded
from hflow.ops.op import op


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, "
    "advantages: f32[rows, resp~?], mask: bool[rows, resp~], ref_logprobs?: f32[rows, resp~]<scored>, "
    "rollout_logprobs?: f32[rows, resp~]<behaviour>, entropy?: f32[rows, resp~]<trained> "
    "-> loss: f32[rows, resp~], kl: f32[rows, resp~], clip_fraction: f32[rows, resp~]",
    needs={"kl_coef": "ref_logprobs"},
)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    *,
    clip: Annotated[float, Ge(0)] = 0.2,
    clip_high: Annotated[float, Ge(0)] | None = None,
    dual_clip: Annotated[float, Gt(1)] | None = None,
    importance_cap: Annotated[float, Gt(0)] = 2.0,
    kl_coef: Annotated[float, Ge(0)] = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k3",
    entropy_coef: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate (PPO, arXiv:1707.06347), with a penalty for leaving the reference (GRPO).

        r = exp(logprobs - old_logprobs)
        s = min(r A, clamp(r, 1 - clip, 1 + clip_high) A),   for A < 0 at least dual_clip * A
        w = min(exp(old_logprobs - rollout_logprobs), importance_cap),   1 without rollout_logprobs
        loss = -w s + kl_coef * kl - entropy_coef * entropy

    Differences of log-probs are held within +-20 before exp. clip_high: arXiv:2503.14476 (DAPO); dual_clip:
    arXiv:1912.09729. w corrects for tokens that other weights sampled than those of `old_logprobs` (decoupled
    PPO, arXiv:2110.00641), truncated as in arXiv:1802.01561 (IMPALA); it has no gradient.

    Args:
        logprobs, old_logprobs, ref_logprobs, rollout_logprobs, entropy: ``[rows, T]``, right-padded.
        advantages: ``[rows]``, one per response, or ``[rows, T]``.
        mask: bool ``[rows, T]``, tokens to learn from.
        kl: the estimate, see `hflow.ops.kl`; without a reference it is measured, not penalised,
            against `old_logprobs`.

    Returns:
        Loss, kl and whether clipping, of the ratio or of a difference of log-probs that the loss reads, held
        the gradient back (1 or 0), each ``[rows, T]``, 0 outside the mask.

    Raises:
        ValueError: a coefficient without its input, `dual_clip` not above 1, or another `kl`.
    """
    if kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef > 0 needs ref_logprobs: connect the log-probs of a reference model")
    if entropy_coef and entropy is None:
        raise ValueError("entropy_coef needs entropy, which the train node computes")
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    high = clip if clip_high is None else clip_high
    advantage = _per_token(advantages, mask)
    surrogate, held = _clipped(bounded(log_ratio).exp(), advantage, clip, high, dual_clip)
    held = held | (beyond(log_ratio) & (advantage != 0))
    if rollout_logprobs is not None:
        surrogate = surrogate * _importance(old_logprobs, rollout_logprobs, mask, importance_cap)
    loss = -surrogate.masked_fill(~mask, 0)
    distance = estimate(logprobs, old_logprobs if ref_logprobs is None else ref_logprobs, mask, kl)
    if kl_coef and ref_logprobs is not None:
        loss = loss + kl_coef * distance
        held = held | _penalty_held(logprobs, ref_logprobs, kl)
    if entropy_coef and entropy is not None:
        loss = loss - entropy_coef * entropy.masked_fill(~mask, 0)
    return loss, distance, (held & mask).to(loss.dtype)


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, "
    "advantages: f32[rows, resp~?], mask: bool[rows, resp~] "
    "-> loss: f32[rows, resp~], clip_fraction: f32[rows, resp~]"
)
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: Annotated[float, Ge(0)] = 1.0,
    clip_high: Annotated[float, Ge(0)] = 0.2,
) -> tuple[Tensor, Tensor]:
    """REINFORCE with clipped importance weights: no token loses its gradient (CISPO, arXiv:2506.13585).

        r = exp(logprobs - old_logprobs),   the difference held within +-20
        loss = -stop_gradient(clamp(r, 1 - clip, 1 + clip_high)) A logprobs

    Args:
        logprobs, old_logprobs: ``[rows, T]``, right-padded.
        advantages: ``[rows]``, one per response, or ``[rows, T]``.
        mask: bool ``[rows, T]``, tokens to learn from.
        clip, clip_high: choices, not the paper's: it only says that the lower bound is not in effect, as
            with 1 here, and that it tunes the upper one.

    Returns:
        Loss and whether the weight was clipped (1 or 0), each ``[rows, T]``, 0 outside the mask.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    ratio = bounded(log_ratio).exp().detach()
    weight = ratio.clamp(1 - clip, 1 + clip_high)
    loss = -weight * _per_token(advantages, mask) * logprobs.masked_fill(~mask, 0)
    return loss, ((weight != ratio) | beyond(log_ratio)).to(loss.dtype)


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, "
    "advantages: f32[rows, resp~?], mask: bool[rows, resp~], ref_logprobs?: f32[rows, resp~]<scored> "
    "-> loss: f32[rows, resp~], kl: f32[rows, resp~], clip_fraction: f32[rows, resp~]",
    needs={"kl_coef": "ref_logprobs"},
)
def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logprobs: Tensor | None = None,
    *,
    kl_coef: Annotated[float, Ge(0)] = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k3",
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy gradient (REINFORCE, Williams 1992; for RLHF, arXiv:2402.14740), with importance weights.

        r = exp(logprobs - old_logprobs),   the difference held within +-20
        loss = -A r + kl_coef * kl

    At the first update of a batch r is 1, and the gradient that of -A logprobs. In further minibatches and
    epochs r weights each token for having been sampled by older weights, alone: not for the tokens before
    it, as in `ppo_clip`, which bounds r more closely.

    Args:
        logprobs, old_logprobs, ref_logprobs: ``[rows, T]``, right-padded.
        advantages: ``[rows]``, one per response, or ``[rows, T]``.
        mask: bool ``[rows, T]``, tokens to learn from.
        kl: the estimate, see `hflow.ops.kl`; without a reference it is measured, not penalised,
            against `old_logprobs`.

    Returns:
        Loss, kl and whether a difference of log-probs that the loss reads was held at +-20, where it has no
        gradient (1 or 0), each ``[rows, T]``, 0 outside the mask.

    Raises:
        ValueError: `kl_coef` without `ref_logprobs`, or another `kl`.
    """
    if kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef > 0 needs ref_logprobs: connect the log-probs of a reference model")
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    advantage = _per_token(advantages, mask)
    loss = -(advantage * bounded(log_ratio).exp()).masked_fill(~mask, 0)
    held = beyond(log_ratio) & (advantage != 0)
    distance = estimate(logprobs, old_logprobs if ref_logprobs is None else ref_logprobs, mask, kl)
    if kl_coef and ref_logprobs is not None:
        loss = loss + kl_coef * distance
        held = held | _penalty_held(logprobs, ref_logprobs, kl)
    return loss, distance, (held & mask).to(loss.dtype)


@op("logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: f32[rows, resp~]")
def negative_log_likelihood(logprobs: Tensor, mask: Tensor, *, coef: float = 1.0) -> Tensor:
    """-coef * log p(token): supervised fine-tuning on the given responses.

    With a `coef` beside another loss of the same model, it is the term that keeps an actor close to its
    pre-training data (ptx, InstructGPT, arXiv:2203.02155).

    Args:
        logprobs: ``[rows, T]``, right-padded.
        mask: bool ``[rows, T]``, tokens to learn from.

    Returns:
        ``[rows, T]``, 0 outside the mask.
    """
    return -coef * logprobs.masked_fill(~mask, 0)


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages that broadcast over ``[rows, T]``; those of tokens are 0 outside the mask."""
    return advantages[:, None] if advantages.dim() == 1 else advantages.masked_fill(~mask, 0)


def _clipped(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's surrogate, to be raised, and where clipping keeps it from following the ratio."""
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    surrogate, held = torch.minimum(plain, clipped), clipped < plain
    if dual is None:
        return surrogate, held
    if dual <= 1:
        raise ValueError(f"dual_clip is {dual:g}; it is the ratio above which bad tokens are clipped: > 1")
    least = torch.where(advantage < 0, dual * advantage, -torch.inf)
    return torch.maximum(surrogate, least), held | (surrogate < least)


def _importance(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Truncated importance weights of the old policy for tokens that the rollout sampled."""
    log_weight = (old_logprobs - rollout_logprobs).masked_fill(~mask, 0)
    return bounded(log_weight).exp().clamp(max=cap).detach()


def _penalty_held(logprobs: Tensor, ref_logprobs: Tensor, kl: str) -> Tensor:
    """Where the penalty has no gradient because its difference is bounded; only k3 takes exp."""
    return beyond(ref_logprobs - logprobs) if kl == "k3" else torch.zeros_like(logprobs, dtype=torch.bool)
