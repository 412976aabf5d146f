"""Rewards from the score of a response and its distance to a reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hflow.ops.kl import estimate
from hflow.ops.op import op


@op(
    "score: f32[rows], logprobs: f32[rows, resp~]<behaviour>, ref_logprobs: f32[rows, resp~]<scored>, "
    "mask: bool[rows, resp~] -> rewards: f32[rows, resp~], kl: f32[rows]"
)
def token_rewards(
    score: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k1",
) -> tuple[Tensor, Tensor]:
    """The score at the last token, less a penalty for every token that the reference finds unlikely.

        r_t = score [t is the last token of the mask] - kl_coef * kl_t

    The reward of RLHF (InstructGPT, arXiv:2203.02155). Where less is better, as for the costs of
    Safe-RLHF (arXiv:2310.12773), `kl_coef` is negative.

    Args:
        score: ``[rows]``.
        logprobs, ref_logprobs: ``[rows, T]``, of the policy that sampled and of the reference.
        mask: bool ``[rows, T]``, the tokens that the policy chose.
        kl: the estimate, see `hflow.ops.kl`.

    Returns:
        Rewards ``[rows, T]``, 0 outside the mask, and the sum of kl over each row's tokens, ``[rows]``.
        A response without tokens has no place for its score: its rewards are 0.

    Raises:
        ValueError: for another `kl`.
    """
    penalty = estimate(logprobs, ref_logprobs, mask, kl)
    still_to_come = mask.int().flip(1).cumsum(1).flip(1)
    is_last = mask & (still_to_come == 1)
    rewards = torch.where(is_last, score[:, None], 0.0) - kl_coef * penalty
    return rewards, penalty.sum(1)


@op(
    "score: f32[rows], logprobs: f32[rows, resp~]<behaviour>, ref_logprobs: f32[rows, resp~]<scored>, "
    "mask: bool[rows, resp~] -> rewards: f32[rows], kl: f32[rows]"
)
def sequence_rewards(
    score: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k1",
) -> tuple[Tensor, Tensor]:
    """The score less a penalty for the whole response, which counts as one action (RLOO, arXiv:2402.14740).

        r = score - kl_coef * sum of kl_t over the mask

    The sum of `token_rewards` over a response's tokens.

    Args:
        score: ``[rows]``.
        logprobs, ref_logprobs: ``[rows, T]``, of the policy that sampled and of the reference.
        mask: bool ``[rows, T]``, the tokens that the policy chose.
        kl: the estimate, see `hflow.ops.kl`.

    Returns:
        Rewards and the sum of kl, each ``[rows]``.

    Raises:
        ValueError: for another `kl`.
    """
    distance = estimate(logprobs, ref_logprobs, mask, kl).sum(1)
    return score - kl_coef * distance, distance
