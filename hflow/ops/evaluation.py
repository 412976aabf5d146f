"""What evaluations measure over the samples of a prompt. Graph files name these by the kind of a metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from hflow.ops.op import op


@op("score: f32[prompts*samples] -> rate: f32[prompts]")
def pass_at_k(score: Tensor, *, k: Annotated[int, Ge(1)], threshold: float = 1.0) -> Tensor:
    """The chance that one of k samples passes, estimated without bias from all n (Chen et al. 2021,
    arXiv:2107.03374): of the ways to draw k of the n, the share with at least one that passes.

    With c that pass it is 1 - C(n-c, k) / C(n, k), multiplied out as they do, lest the binomials overflow.

    Args:
        score: float32 ``[prompts, n]``; a sample passes from `threshold` on.
        k: at most n.

    Returns:
        float32 ``[prompts]``.

    Raises:
        ValueError: k is not one of 1, …, n.
    """
    _check_k(k, score.shape[1])
    passed = (score >= threshold).sum(dim=1)
    return torch.tensor([_pass_at_k(score.shape[1], int(c), k) for c in passed], dtype=torch.float32)


def _pass_at_k(n: int, c: int, k: int) -> float:
    none_passes = 1.0
    for i in range(n - c + 1, n + 1):
        none_passes *= max(0.0, 1.0 - k / i)  # at i = k and below no such draw is left
    return 1.0 - none_passes


@op("answer: str[prompts*samples], score: f32[prompts*samples] -> rate: f32[prompts]")
def majority_at_k(
    answer: Sequence[Sequence[str]], score: Tensor, *, k: Annotated[int, Ge(1)], threshold: float = 1.0
) -> Tensor:
    """How often the answer that most of k samples give is right (self-consistency, Wang et al. 2022,
    arXiv:2203.11171).

    The n samples of a prompt are taken k by k, in their order; a rest of fewer than k does not count. Answers
    are compared without the white space around them. A sample without an answer (an empty text) does not
    vote; where none votes, the group is wrong. An answer is as right as its samples are: the share of them
    that pass. Of answers with equally many votes each counts alike, whichever was drawn first.

    Args:
        answer: for each prompt its n answers.
        score: float32 ``[prompts, n]``; a sample passes from `threshold` on.
        k: at most n.

    Returns:
        float32 ``[prompts]``, the mean over the groups of a prompt.

    Raises:
        ValueError: k is not one of 1, …, n.
    """
    return _majorities([[text.strip() or None for text in row] for row in answer], score, k, threshold)


@op("answer: i32[prompts*samples], score: f32[prompts*samples] -> rate: f32[prompts]")
def majority_number_at_k(
    answer: Tensor, score: Tensor, *, k: Annotated[int, Ge(1)], threshold: float = 1.0
) -> Tensor:
    """As `majority_at_k`, of answers that are whole numbers; all of them vote.

    Args:
        answer: int32 ``[prompts, n]``.
        score: float32 ``[prompts, n]``.

    Returns:
        float32 ``[prompts]``.

    Raises:
        ValueError: k is not one of 1, …, n.
    """
    return _majorities(answer.tolist(), score, k, threshold)


def _majorities(answers: Sequence[Sequence[Hashable]], score: Tensor, k: int, threshold: float) -> Tensor:
    """`answers`: None for a sample that does not vote."""
    n = score.shape[1]
    _check_k(k, n)
    passed = (score >= threshold).tolist()
    rates = [
        [_majority(row[i : i + k], right[i : i + k]) for i in range(0, n - k + 1, k)]
        for row, right in zip(answers, passed, strict=True)
    ]
    return torch.tensor(rates, dtype=torch.float32).reshape(len(rates), n // k).mean(dim=1)


def _majority(answers: Sequence[Hashable], right: Sequence[bool]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    first = {answer for answer, count in votes.items() if count == most}
    of_first = [float(is_right) for answer, is_right in zip(answers, right) if answer in first]
    return sum(of_first) / len(of_first) if of_first else 0.0


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, and a prompt has {n} samples")
