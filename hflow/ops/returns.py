"""Returns: sums of the rewards that are still to come."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from hflow.ops.op import op


@op("rewards: f32[rows, resp~], mask: bool[rows, resp~] -> returns: f32[rows, resp~]")
def discounted_returns(
    rewards: Tensor, mask: Tensor, *, gamma: Annotated[float, Ge(0), Le(1)] = 1.0
) -> Tensor:
    """The discounted sum of rewards from each token on (REINFORCE++, arXiv:2501.03262).

        G_t = r_t + gamma G_{t+1}

    t + 1 is the next token *of the mask*; after the last one G is 0.

    Args:
        rewards: ``[rows, T]``.
        mask: bool ``[rows, T]``, the tokens that the policy chose.
        gamma: discount per token.

    Returns:
        ``[rows, T]``, 0 outside the mask.
    """
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        following = torch.where(here, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(here, following, 0.0)
    return returns
