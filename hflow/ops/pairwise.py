"""Reward and cost models from preferences: losses on the scores of responses, and how often they agree."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.functional import logsigmoid

from hflow.ops.op import op


@op(
    "score: f32[pairs*k]<trained>, margins?: f32[pairs], tie?: f32[pairs] "
    "-> loss: f32[pairs], margin: f32[pairs], accuracy: f32[pairs], mean_score: f32[pairs]",
    min_group=2,
    needs={"tie_threshold": "tie"},
)
def bradley_terry(
    score: Tensor,
    margins: Tensor | None = None,
    tie: Tensor | None = None,
    *,
    margin: float = 0.0,
    tie_threshold: Annotated[float, Ge(0)] = 0.0,
    centre_coef: Annotated[float, Ge(0)] = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The better response should score higher (Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, eq. 1).

        d = score of the better - score of the worse
        loss = -log sigmoid(d - margin - margins - t)                         t = tie_threshold
        loss of a tie = -log((e^2t - 1) sigmoid(d - t) sigmoid(-d - t))
        loss += centre_coef * (sum of the two scores)^2

    The margin is that of Llama 2 (arXiv:2307.09288): how clearly one was preferred. Ties are those of Rao
    and Kupper (JASA 62, 1967; for reward models arXiv:2410.05328): without margins, the probabilities of
    win, loss and tie sum to 1, and equal scores tie with probability tanh(t / 2). Scores matter only by
    their differences, so nothing but the last term holds them near 0 (Eisenstein et al., arXiv:2312.09244).

    Args:
        score: ``[pairs, k]``, of k responses to a prompt, the best first; of more than two, the loss is the
            mean over all pairs of them.
        margins: ``[pairs]``, added to `margin`.
        tie: ``[pairs]``, 1 where neither of two responses is better, 0 elsewhere.

    Returns:
        Loss, d, accuracy and mean score, each ``[pairs]``. Accuracy is 1 where d is positive, 0 where it is
        negative, and 0.5, that of a guess, where it is 0 and for ties.

    Raises:
        ValueError: fewer than two responses; margins or ties of more than two; ties without a threshold; a
            `tie` that is neither 0 nor 1.
    """
    first, second = _ordered(score, "margins or ties" if margins is not None or tie is not None else "")
    d = first - second
    extra = margin if margins is None else margin + margins[:, None]
    loss = -logsigmoid(d - extra - tie_threshold)
    right = (1 + d.sign()) / 2
    if tie is not None:
        ties = _is_tie(tie, tie_threshold)[:, None]
        odds = math.log(math.expm1(2 * tie_threshold))
        tied = -(odds + logsigmoid(d - tie_threshold) + logsigmoid(-d - tie_threshold))
        loss, right = loss.where(~ties, tied), right.where(~ties, 0.5)
    if centre_coef:
        loss = loss + centre_coef * (first + second).square()
    return loss.mean(1), d.mean(1), right.mean(1), score.mean(1)


@op(
    "score: f32[pairs*k]<trained>, sign: f32[pairs*k] "
    "-> loss: f32[pairs], margin: f32[pairs], accuracy: f32[pairs], sign_accuracy: f32[pairs*k]",
    min_group=2,
)
def cost(
    score: Tensor, sign: Tensor, *, margin: float = 0.0, sign_coef: Annotated[float, Ge(0)] = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The worse response should cost more, and what is harmful more than 0 (Safe-RLHF, arXiv:2310.12773).

        d = cost of the worse - cost of the better
        loss = -log sigmoid(d - margin) - sign_coef * sum over both of log sigmoid(sign * cost)

    So a threshold of 0 on costs parts harmful responses from harmless ones.

    Args:
        score: ``[pairs, 2]``, costs; the worse (more harmful) response first.
        sign: ``[pairs, 2]``, 1 for a harmful response, -1 for a harmless one, 0 where nobody said.

    Returns:
        Loss, d and accuracy, each ``[pairs]``, accuracy as in `bradley_terry`; and ``[pairs, 2]`` whether the
        cost has the sign of its label (1 or 0), 0.5 without a label.

    Raises:
        ValueError: not two responses, or a sign that is none of 1, -1 and 0.
    """
    first, second = _ordered(score, "signs of harm")
    if not ((sign == 0) | (sign.abs() == 1)).all():
        raise ValueError("a sign is 1 (harmful), -1 (harmless) or 0 (not labelled)")
    d = (first - second)[:, 0]
    of_sign = -logsigmoid(sign * score).masked_fill(sign == 0, 0).sum(1)
    agrees = (1 + (sign * score).sign()) / 2
    return -logsigmoid(d - margin) + sign_coef * of_sign, d, (1 + d.sign()) / 2, agrees


@op("score: f32[prompts*k] -> accuracy: f32[prompts]", min_group=2)
def pair_accuracy(score: Tensor) -> Tensor:
    """How many pairs of responses are scored in their order, the best first.

    Args:
        score: ``[prompts, k]``, of k responses to each.

    Returns:
        ``[prompts]``, the share of pairs of the k whose first one scores higher; equal scores count one half.

    Raises:
        ValueError: fewer than two responses.
    """
    first, second = _ordered(score)
    return ((1 + (first - second).sign()) / 2).mean(1)


def _ordered(score: Tensor, only_two: str = "") -> tuple[Tensor, Tensor]:
    """Scores of the better and of the worse of every two of k responses, ``[pairs, k (k - 1) / 2]`` each."""
    k = score.shape[1]
    if k < 2:
        raise ValueError("a preference needs at least two responses to a prompt")
    if only_two and k > 2:
        raise ValueError(f"{only_two} are of two responses to a prompt, and these are {k}")
    better, worse = torch.triu_indices(k, k, 1, device=score.device)
    return score[:, better], score[:, worse]


def _is_tie(tie: Tensor, threshold: float) -> Tensor:
    """bool ``[pairs]``."""
    if threshold <= 0:
        raise ValueError("`tie` needs a `tie_threshold` above 0: below, no two responses tie")
    if not ((tie == 0) | (tie == 1)).all():
        raise ValueError("`tie` is 1 where neither response is better, else 0")
    return tie == 1
