"""Ops against their formulas, written out in Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hflow.ops.advantages import group_normalise
from hflow.ops.aggregate import token_weights
from hflow.ops.losses import negative_log_likelihood, ppo_clip
from hflow.ops.rewards import exact_match

LOGPROBS = [[-1.0, -0.3, -2.0], [-0.5, -4.0, -1.5]]
OLD = [[-1.1, -0.9, -1.0], [-0.5, -3.9, -1.6]]
REF = [[-0.8, -0.4, -2.5], [-0.6, -4.4, -1.0]]
ADVANTAGES = [1.5, -0.7]
MASK = [[True, True, True], [True, True, False]]


def tensor(values: list[list[float]] | list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def book(row: int, column: int, clip: float, kl_coef: float) -> tuple[float, float, float]:
    """PPO's clipped loss with a k3 penalty, for one token."""
    if not MASK[row][column]:
        return 0.0, 0.0, 0.0
    ratio = math.exp(LOGPROBS[row][column] - OLD[row][column])
    plain = ratio * ADVANTAGES[row]
    clipped = max(1 - clip, min(1 + clip, ratio)) * ADVANTAGES[row]
    d = REF[row][column] - LOGPROBS[row][column]
    kl = math.exp(d) - d - 1
    return -min(plain, clipped) + kl_coef * kl, kl, float(clipped < plain)


@pytest.mark.parametrize("clip,kl_coef", [(0.2, 0.0), (0.05, 0.1), (0.5, 1.0)])
def test_ppo_clip(clip: float, kl_coef: float) -> None:
    found = ppo_clip(
        tensor(LOGPROBS),
        tensor(OLD),
        tensor(ADVANTAGES),
        torch.tensor(MASK),
        tensor(REF),
        clip=clip,
        kl_coef=kl_coef,
    )
    for row in range(2):
        for column in range(3):
            for value, expected in zip(found, book(row, column, clip, kl_coef)):
                assert value[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_ppo_clip_has_its_textbook_gradient() -> None:
    """d loss / d logprob is -r A while the ratio is free, and 0 where clipping holds it back."""
    logprobs = tensor(LOGPROBS).requires_grad_()
    loss, _, clipped = ppo_clip(logprobs, tensor(OLD), tensor(ADVANTAGES), torch.tensor(MASK), clip=0.2)
    loss.sum().backward()
    assert logprobs.grad is not None
    for row in range(2):
        for column in range(3):
            held = bool(clipped[row, column]) or not MASK[row][column]
            ratio = math.exp(LOGPROBS[row][column] - OLD[row][column])
            expected = 0.0 if held else -ratio * ADVANTAGES[row]
            assert logprobs.grad[row, column].item() == pytest.approx(expected, abs=1e-12)
    assert 0 < clipped.sum() < 5


def test_ppo_clip_measures_kl_against_the_behaviour_policy_without_a_reference() -> None:
    _, kl, _ = ppo_clip(tensor(LOGPROBS), tensor(OLD), tensor(ADVANTAGES), torch.tensor(MASK))
    d = OLD[0][1] - LOGPROBS[0][1]
    assert kl[0, 1].item() == pytest.approx(math.exp(d) - d - 1, abs=1e-12)


def test_ppo_clip_needs_a_reference_for_a_penalty() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        ppo_clip(tensor(LOGPROBS), tensor(OLD), tensor(ADVANTAGES), torch.tensor(MASK), kl_coef=0.1)


def test_masked_tokens_cannot_overflow() -> None:
    """A ratio of exp(1000) outside the mask reaches neither the loss nor the gradient."""
    logprobs = tensor([[-1.0, 0.0]]).requires_grad_()
    old, mask = tensor([[-1.0, -1000.0]]), torch.tensor([[True, False]])
    loss, kl, _ = ppo_clip(logprobs, old, tensor([1.0]), mask, old, kl_coef=1.0)
    (loss.sum() + kl.sum()).backward()
    assert logprobs.grad is not None
    assert loss.tolist() == [[-1.0, 0.0]] and logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_negative_log_likelihood() -> None:
    loss = negative_log_likelihood(tensor(LOGPROBS), torch.tensor(MASK))
    assert loss.tolist() == [[1.0, 0.3, 2.0], [0.5, 4.0, 0.0]]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_group_normalise(std: str) -> None:
    scores = [[1.0, 0.0, 0.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0]]
    found = group_normalise(tensor(scores), std=std, eps=0.01)  # type: ignore[arg-type]
    for row, values in zip(found.tolist(), scores):
        mean = statistics.fmean(values)
        scale = {
            "sample": statistics.stdev(values) + 0.01,
            "population": statistics.pstdev(values) + 0.01,
            "none": 1.0,
        }
        assert row == pytest.approx([(v - mean) / scale[std] for v in values], abs=1e-12)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_a_group_of_one_has_no_advantage(std: str) -> None:
    assert group_normalise(tensor([[3.0], [7.0]]), std=std).tolist() == [[0.0], [0.0]]  # type: ignore[arg-type]


def test_group_normalise_knows_its_options() -> None:
    with pytest.raises(ValueError, match="none"):
        group_normalise(tensor([[1.0, 2.0]]), std="max")  # type: ignore[arg-type]


def test_exact_match() -> None:
    found = exact_match([["12", " 12\n", "1 2"], ["", "7", "7."]], ["12 ", "7"])
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    with pytest.raises(ValueError):
        exact_match([["1"]], ["1", "2"])


ROWS_OF_TOKENS = [[3.0, 1.0, 4.0, 1.0], [5.0], [], [9.0, 2.0]]


@pytest.mark.parametrize(
    "mode,expected",
    [
        ("token_mean", statistics.fmean([3, 1, 4, 1, 5, 9, 2])),
        ("sequence_mean", (9 / 4 + 5 + 0 + 11 / 2) / 4),
        ("sequence_sum", (9 + 5 + 0 + 11) / 4),
    ],
)
@pytest.mark.parametrize("parts", [[4], [1, 3], [1, 1, 1, 1]])
def test_aggregates_do_not_depend_on_how_the_minibatch_is_split(
    mode: str, expected: float, parts: list[int]
) -> None:
    total, start = 0.0, 0
    for size in parts:
        rows = ROWS_OF_TOKENS[start : start + size]
        start += size
        width = max(map(len, rows))
        losses = torch.tensor([row + [99.0] * (width - len(row)) for row in rows]).reshape(len(rows), width)
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows], dtype=torch.bool)
        mask = mask.reshape(len(rows), width)
        total += (token_weights(mask, mode, 7, 4) * losses).sum().item()
    assert total == pytest.approx(expected, rel=1e-6)


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_mean"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), "mean", 1, 1)
