"""Advantages from the scores of a group of responses to one prompt."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from hflow.ops.centring import centred
from hflow.ops.op import op


@op("score: f32[prompts*group] -> advantages: f32[prompts*group]", min_group=2)
def group_normalise(
    score: Tensor,
    *,
    std: Literal["sample", "population", "none"] = "sample",
    eps: Annotated[float, Ge(0)] = 1e-6,
) -> Tensor:
    """Scores relative to the other responses to the same prompt (GRPO, arXiv:2402.03300).

        advantage = (score - mean) / (std + eps)        over the responses to one prompt

    Args:
        score: ``[prompts, group]``.
        std: divide by the sample deviation (n - 1), the population deviation (n), or nothing
            (Dr. GRPO, arXiv:2503.20783).
        eps: added to the deviation. Equal scores have advantage 0, exactly.

    Returns:
        ``[prompts, group]``. A group of one has nothing to be compared with: its advantage is 0.

    Raises:
        ValueError: for another `std`.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std is `{std}`; it is one of sample, population, none")
    size = score.shape[1]
    if size == 1:
        return torch.zeros_like(score)
    advantage, _ = centred(score, 1)
    if std != "none":
        variance = advantage.square().sum(1, keepdim=True) / (size - int(std == "sample"))
        advantage = advantage / (variance.sqrt() + eps)
    return advantage.to(score.dtype)


@op("score: f32[prompts*group] -> advantages: f32[prompts*group]", min_group=2)
def leave_one_out(score: Tensor) -> Tensor:
    """The score less the mean score of the other responses to the same prompt (RLOO, arXiv:2402.14740).

        advantage_i = score_i - mean of score_j over j != i = n / (n - 1) * (score_i - mean)

    Args:
        score: ``[prompts, group]``.

    Returns:
        ``[prompts, group]``; equal scores have advantage 0, exactly. A group of one has nothing to be
        compared with: its advantage is 0.
    """
    size = score.shape[1]
    if size == 1:
        return torch.zeros_like(score)
    return (centred(score, 1)[0] * (size / (size - 1))).to(score.dtype)


@op("score: f32[prompts*group], greedy_score: f32[prompts] -> advantages: f32[prompts*group]")
def greedy_baseline(score: Tensor, greedy_score: Tensor) -> Tensor:
    """The score less that of the greedy response to the same prompt (ReMax, arXiv:2310.10505).

        advantage = score - greedy_score

    Args:
        score: ``[prompts, group]``.
        greedy_score: ``[prompts]``, of the response that takes the likeliest token every time.

    Returns:
        ``[prompts, group]``.
    """
    return score - greedy_score[:, None]
