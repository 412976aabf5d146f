"""Losses per response and per group of responses against their formulas in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hflow.ops.preferences import dpo
from hflow.ops.sequence_losses import gspo
from tests.ops.examples import LOGPROBS, OLD, PER_ROW, REF, mask, tensor, tokens


@pytest.mark.parametrize("clip,clip_high", [(3e-4, 4e-4), (0.05, 0.5)])
def test_gspo(clip: float, clip_high: float) -> None:
    loss, clipped = gspo(
        tensor(LOGPROBS), tensor(OLD), tensor(PER_ROW), mask(), clip=clip, clip_high=clip_high
    )
    for row, a in enumerate(PER_ROW):
        if not tokens(row):
            assert (loss[row], clipped[row]) == (0, 0)
            continue
        logs = [LOGPROBS[row][column] - OLD[row][column] for column in tokens(row)]
        ratio = math.exp(sum(logs) / len(logs))
        plain, bounded = ratio * a, min(max(ratio, 1 - clip), 1 + clip_high) * a
        assert loss[row].item() == pytest.approx(-min(plain, bounded), abs=1e-12)
        assert clipped[row].item() == float(bounded < plain)
    assert clipped.shape == (4,) and clipped.any()


def grouped(values: list[list[float]]) -> Tensor:
    """Rows 0 and 1, and rows 2 and 3, as two groups of two responses."""
    return tensor(values).reshape(2, 2, 5)


def counted(row: int) -> list[int]:
    """The columns of a row that count, of one without any the first."""
    return tokens(row) or [0]


def pairs() -> Tensor:
    """The mask of the two groups, in which every response has a token."""
    rows = [[column in counted(row) for column in range(5)] for row in range(4)]
    return torch.tensor(rows).reshape(2, 2, 5)


def book_dpo(rewards: list[float], chosen: int, rejected: int, smoothing: float) -> tuple[float, float]:
    margin = rewards[chosen] - rewards[rejected]
    wins, loses = (1 / (1 + math.exp(-sign * margin)) for sign in (1, -1))
    return -(1 - smoothing) * math.log(wins) - smoothing * math.log(loses), margin


@pytest.mark.parametrize("beta,smoothing", [(0.1, 0.0), (0.5, 0.2)])
@pytest.mark.parametrize(
    "scores,order", [(None, (0, 1)), ([[0.5, 0.1]] * 2, (0, 1)), ([[0.0, 2.0]] * 2, (1, 0))]
)
def test_dpo(beta: float, smoothing: float, scores: list[list[float]] | None, order: tuple[int, int]) -> None:
    loss, margin, accuracy = dpo(
        grouped(LOGPROBS),
        grouped(REF),
        pairs(),
        None if scores is None else tensor(scores),
        beta=beta,
        label_smoothing=smoothing,
    )
    gains = [sum(LOGPROBS[row][c] - REF[row][c] for c in counted(row)) for row in range(4)]
    for pair in range(2):
        rewards = [beta * gain for gain in gains[2 * pair : 2 * pair + 2]]
        expected = book_dpo(rewards, *order, smoothing)
        assert (loss[pair].item(), margin[pair].item()) == pytest.approx(expected, abs=1e-12)
        assert accuracy[pair].item() == float(expected[1] > 0)


@pytest.mark.parametrize("scores,order", [(None, (0, 1)), ([[0.0, 2.0]] * 2, (1, 0))])
def test_dpo_holds_the_chosen_response_likely(
    scores: list[list[float]] | None, order: tuple[int, int]
) -> None:
    """By the mean log-prob of its tokens (arXiv:2404.19733, equation 1)."""
    given = (
        grouped(LOGPROBS),
        grouped(REF),
        pairs(),
        None if scores is None else tensor(scores),
    )
    alone, held = dpo(*given)[0], dpo(*given, nll_coef=0.7)[0]
    for pair in range(2):
        row = 2 * pair + order[0]
        likelihood = sum(LOGPROBS[row][c] for c in counted(row)) / len(counted(row))
        assert held[pair].item() == pytest.approx(alone[pair].item() - 0.7 * likelihood, abs=1e-12)


def test_dpo_takes_the_best_and_the_worst_of_many() -> None:
    """Without scores the first and the last; each response has one token, of log-ratio 1, 2, 3, 4."""
    gains = tensor([[[1.0], [2.0], [3.0], [4.0]]])
    given = (gains, torch.zeros_like(gains), torch.ones(1, 4, 1).bool())
    assert dpo(*given, beta=1.0)[1].item() == 1 - 4
    assert dpo(*given, tensor([[0.0, 5.0, -1.0, 0.0]]), beta=1.0)[1].item() == 2 - 3


def test_dpo_learns_nothing_from_equal_scores() -> None:
    """Which is no preference for the model to have right or wrong: accuracy is that of a guess."""
    logprobs = grouped(LOGPROBS).requires_grad_()
    scores = tensor([[1.0, 1.0], [0.0, 1.0]])
    outputs = dpo(logprobs, grouped(REF), pairs(), scores)
    assert [output[0].item() for output in outputs] == [0.0, 0.0, 0.5]
    outputs[0].sum().backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[0].any() and logprobs.grad[1].any()


def test_dpo_prefers_none_of_the_responses_that_do_not_count() -> None:
    """The best and the worst of four are dropped, then all but one, then all."""
    gains = tensor([[1.0, 2.0, 3.0, 4.0]] * 3).unsqueeze(2).requires_grad_()
    counts = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool().unsqueeze(2)
    scores = tensor([[9.0, 1.0, 5.0, -9.0]] * 3)
    loss, margin, accuracy = dpo(gains, torch.zeros_like(gains), counts, scores, beta=1.0, nll_coef=1.0)
    assert (margin.tolist(), accuracy.tolist()) == ([3 - 2, 0, 0], [1, 0.5, 0.5])
    assert loss[1:].tolist() == [0, 0]
    loss.sum().backward()
    assert gains.grad is not None and gains.grad.ne(0).squeeze(2).tolist() == [[0, 1, 1, 0], [0] * 4, [0] * 4]


def test_dpo_at_the_reference_is_a_guess() -> None:
    """No response has gained on another: the loss is ln 2, and the model is right half of the time."""
    loss, margin, accuracy = dpo(grouped(REF), grouped(REF), pairs())
    assert loss.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-12)
    assert (margin.tolist(), accuracy.tolist()) == ([0.0, 0.0], [0.5, 0.5])


def test_dpo_needs_two_responses() -> None:
    with pytest.raises(ValueError, match="two responses"):
        dpo(torch.zeros(3, 1, 5), torch.zeros(3, 1, 5), torch.ones(3, 1, 5).bool())
