"""Rewards under a constraint on costs: the Lagrangian method of Safe-RLHF."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from hflow.ops.op import op


@op(
    "cost: f32[rows], log_multiplier: f32[] -> log_multiplier: f32[], multiplier: f32[], mean_cost: f32[]",
    whole_batch=True,
)
def lagrange_multiplier(
    cost: Tensor, log_multiplier: Tensor, *, lr: Annotated[float, Ge(0)] = 0.1, threshold: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the multiplier: up while costs are above the threshold (Safe-RLHF, arXiv:2310.12773).

        ln m' = ln m + lr * m * (mean cost - threshold)

    This is gradient ascent on m (mean cost - threshold) in ln m, which keeps m positive.

    Args:
        cost: ``[rows]``, all rows of the batch.
        log_multiplier: ``[]``, ln m of the step before.

    Returns:
        ln m', m' and the mean cost, each ``[]``.
    """
    mean_cost = cost.mean()
    updated = log_multiplier + lr * log_multiplier.exp() * (mean_cost - threshold)
    return updated, updated.exp(), mean_cost


@op(
    "reward_advantages: f32[rows, resp~], cost_advantages: f32[rows, resp~], log_multiplier: f32[] "
    "-> advantages: f32[rows, resp~]<mixed>"
)
def lagrangian(reward_advantages: Tensor, cost_advantages: Tensor, log_multiplier: Tensor) -> Tensor:
    """Advantages of the reward less those of the cost, weighted by the multiplier m (Safe-RLHF).

        A = (A_reward - m A_cost) / (1 + m)

    Args:
        reward_advantages, cost_advantages: ``[rows, T]``.
        log_multiplier: ``[]``, ln m.

    Returns:
        ``[rows, T]``, 0 where both are 0.
    """
    multiplier = log_multiplier.exp()
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)
