"""Losses on which of several responses is preferred."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.nn.functional import logsigmoid

from hflow.ops.op import op


@op(
    "logprobs: f32[pairs*k, resp~]<trained>, ref_logprobs: f32[pairs*k, resp~]<scored>, "
    "mask: bool[pairs*k, resp~], score?: f32[pairs*k] "
    "-> loss: f32[pairs], margin: f32[pairs], accuracy: f32[pairs]",
    min_group=2,
)
def dpo(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    score: Tensor | None = None,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
    nll_coef: Annotated[float, Ge(0)] = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefer the chosen response by more than the reference does (DPO, arXiv:2305.18290).

        h = sum over the mask of (logprobs - ref_logprobs)              of a response
        margin = beta * (h of the chosen one - h of the rejected one)
        loss = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)    e = label_smoothing
               - nll_coef * mean over the mask of logprobs              of the chosen one

    Chosen is the response of the highest score, rejected that of the lowest; without scores the first and
    the last. e is the share of labels taken to be wrong (conservative DPO, Mitchell 2023). The margin may
    grow while both responses become less likely, the chosen one too (arXiv:2410.08847); `nll_coef` holds
    against that (Iterative RPO, arXiv:2404.19733, has 1). Responses of which no token counts, as where they
    were cut (`mask_truncated`), are neither chosen nor rejected.

    Args:
        logprobs, ref_logprobs: ``[pairs, k, T]``, right-padded, k responses to one prompt.
        mask: bool ``[pairs, k, T]``, tokens that count.
        score: ``[pairs, k]``.

    Returns:
        Loss, margin and accuracy, each ``[pairs]``. Accuracy is 1 where the margin is positive, 0 where it
        is negative and 0.5, that of a guess, where it is 0. Where all scores are equal, or fewer than two
        responses count, nothing is preferred: loss and margin are 0, so accuracy is 0.5.

    Raises:
        ValueError: fewer than two responses to a prompt.
    """
    if logprobs.shape[1] < 2:
        raise ValueError("a preference needs at least two responses to a prompt")
    rewards = beta * (logprobs - ref_logprobs).masked_fill(~mask, 0).sum(2)
    if score is None:
        score = torch.arange(rewards.shape[1], 0.0, -1, device=rewards.device).expand_as(rewards)
    absent = ~mask.any(2)
    chosen = score.masked_fill(absent, -torch.inf).argmax(1, keepdim=True)
    rejected = score.masked_fill(absent, torch.inf).argmin(1, keepdim=True)
    margin = (rewards.gather(1, chosen) - rewards.gather(1, rejected))[:, 0]
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    likelihood = logprobs.masked_fill(~mask, 0).sum(2) / mask.sum(2).clamp(min=1)
    loss = loss - nll_coef * likelihood.gather(1, chosen)[:, 0]
    loss = loss.masked_fill((chosen == rejected)[:, 0], 0)  # one is both: all scores are equal
    return loss, margin, (1 + margin.sign()) / 2
