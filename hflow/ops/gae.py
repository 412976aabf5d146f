"""Generalised advantage estimation."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from hflow.ops.op import op


@op(
    "values: f32[rows, resp~]<value>, rewards: f32[rows, resp~], mask: bool[rows, resp~] "
    "-> advantages: f32[rows, resp~], returns: f32[rows, resp~]"
)
def gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    lam: Annotated[float, Ge(0), Le(1)] = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages as discounted sums of temporal differences (GAE, arXiv:1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    t + 1 is the next token *of the mask*: text that a tool put into the response is skipped, as if its
    neighbours touched. After the last token V and A are 0.

    Args:
        values: ``[rows, T]``, V_t at the position that predicts token t.
        rewards: ``[rows, T]``.
        mask: bool ``[rows, T]``, the tokens that the policy chose.
        gamma: discount per token.
        lam: 0 trusts the values (one-step differences), 1 the rewards (sums up to the end).

    Returns:
        Advantages and returns, ``[rows, T]``, 0 outside the mask.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)
