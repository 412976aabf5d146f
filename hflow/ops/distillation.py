"""Losses against a teacher model."""

from __future__ import annotations

from torch import Tensor

from hflow.ops.log_ratio import beyond, bounded
from hflow.ops.op import op


@op(
    "logprobs: f32[rows, resp~]<trained>, old_logprobs: f32[rows, resp~]<old>, "
    "teacher_logprobs: f32[rows, resp~]<scored>, mask: bool[rows, resp~] "
    "-> loss: f32[rows, resp~], kl: f32[rows, resp~], clip_fraction: f32[rows, resp~]"
)
def reverse_kl(
    logprobs: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(student || teacher) at each token, on what the student samples (GKD, arXiv:2306.13649).

        r = exp(logprobs - old_logprobs),   the difference held within +-20
        loss = r * stop_gradient(old_logprobs - teacher_logprobs)

    The score-function estimate: at r = 1 the expected gradient is that of the token's KL. The effect of a
    token on later ones is left out (MiniLLM, arXiv:2306.08543, keeps it).

    Args:
        logprobs, old_logprobs: ``[rows, T]``, of the student in training, and before the step's updates.
        teacher_logprobs: ``[rows, T]``, of the same tokens.
        mask: bool ``[rows, T]``, tokens to learn from.

    Returns:
        Loss, the estimate k1 of KL, ``old_logprobs - teacher_logprobs``, and whether the difference was held
        at +-20, where it has no gradient (1 or 0), each ``[rows, T]``, 0 outside the mask.
    """
    kl = (old_logprobs - teacher_logprobs).masked_fill(~mask, 0).detach()
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    return bounded(log_ratio).exp() * kl, kl, beyond(log_ratio).to(kl.dtype)
