"""Rewards from the score of a response and its distance to a reference.

The distance is always k1 = logprobs - ref_logprobs (`hflow.ops.kl`). A reward is a factor of the gradient of
log-probs, and only with k1 is that product, in expectation, the gradient of KL(policy || reference). k2 and
k3 are positive for tokens that the reference finds likelier too, and would push these down as well: to
first order, close to the reference, they do not pull towards it at all. They are for losses.
"""

from __future__ import annotations

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
) -> tuple[Tensor, Tensor]:
    """The score at the last token, less a penalty for every token that the reference finds unlikely.

        kl_t = logprobs_t - ref_logprobs_t
        r_t = score [t is the last token of the mask] - kl_coef * kl_t

    kl_t is k1: of the estimates in `hflow.ops.kl` only this one, in a reward, pulls towards the reference;
    k2 and k3 also punish tokens that the reference finds likelier.

    The reward of RLHF (InstructGPT, arXiv:2203.02155). Where less is better, as for the costs of
    Safe-RLHF (arXiv:2310.12773), `kl_coef` is negative.

    Args:
        score: ``[rows]``.
        logprobs, ref_logprobs: ``[rows, T]``, of the policy that sampled and of the reference.
        mask: bool ``[rows, T]``, the tokens that the policy chose.

    Returns:
        Rewards ``[rows, T]``, 0 outside the mask, and the sum of kl over each row's tokens, ``[rows]``.
        A response without tokens has no place for its score: its rewards are 0.
    """
    penalty = estimate(logprobs, ref_logprobs, mask, "k1")
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
) -> tuple[Tensor, Tensor]:
    """The score less a penalty for the whole response, which counts as one action (RLOO, arXiv:2402.14740).

        kl_t = logprobs_t - ref_logprobs_t
        r = score - kl_coef * sum of kl_t over the mask

    The sum of `token_rewards` over a response's tokens; kl_t is k1 for the same reason.

    Args:
        score: ``[rows]``.
        logprobs, ref_logprobs: ``[rows, T]``, of the policy that sampled and of the reference.
        mask: bool ``[rows, T]``, the tokens that the policy chose.

    Returns:
        Rewards and the sum of kl, each ``[rows]``.
    """
    distance = estimate(logprobs, ref_logprobs, mask, "k1").sum(1)
    return score - kl_coef * distance, distance
