"""Advantages from scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hflow.ops.op import op


@op("score: f32[prompts*group] -> advantages: f32[prompts*group]")
def group_normalise(
    score: Tensor, *, std: Literal["sample", "population", "none"] = "sample", eps: float = 1e-6
) -> Tensor:
    """Scores relative to the other responses to the same prompt (GRPO, arXiv:2402.03300).

        advantage = (score - mean) / (std + eps)        over the responses to one prompt

    Args:
        score: ``[prompts, group]``.
        std: divide by the sample deviation (n - 1), the population deviation (n), or nothing
            (Dr. GRPO, arXiv:2503.20783).
        eps: added to the deviation; equal scores have advantage 0.

    Returns:
        ``[prompts, group]``. A group of one has nothing to be compared with: its advantage is 0.

    Raises:
        ValueError: for another `std`.
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f"std is `{std}`; it is one of sample, population, none")
    centred = score - score.mean(1, keepdim=True)
    if std == "none" or score.shape[1] == 1:
        return centred if score.shape[1] > 1 else torch.zeros_like(score)
    return centred / (score.std(1, keepdim=True, correction=int(std == "sample")) + eps)
