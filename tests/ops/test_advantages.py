"""Advantages from scores, and the filter on them, against the formulas in Python floats."""

from __future__ import annotations

import statistics

import pytest
import torch

from hflow.ops.advantages import greedy_baseline, group_normalise, leave_one_out
from hflow.ops.baselines import moving_baseline
from hflow.ops.filters import mixed_groups
from hflow.ops.whitening import whiten, whiten_scores
from tests.ops.examples import tensor

SCORES = [[1.0, 0.0, 0.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0]]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_group_normalise(std: str) -> None:
    found = group_normalise(tensor(SCORES), std=std, eps=0.01)  # type: ignore[arg-type]
    for row, values in zip(found.tolist(), SCORES):
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


def test_leave_one_out() -> None:
    for row, values in zip(leave_one_out(tensor(SCORES)).tolist(), SCORES):
        others = [statistics.fmean(values[:i] + values[i + 1 :]) for i in range(len(values))]
        assert row == pytest.approx([v - o for v, o in zip(values, others)], abs=1e-12)


def test_leave_one_out_of_a_group_of_one_is_nothing() -> None:
    assert leave_one_out(tensor([[3.0], [7.0]])).tolist() == [[0.0], [0.0]]


def test_greedy_baseline() -> None:
    found = greedy_baseline(tensor([[1.0, 0.5], [0.0, -2.0], [4.0, 4.0]]), tensor([1.0, -1.0, 0.0]))
    assert found.tolist() == [[0.0, -0.5], [1.0, -1.0], [4.0, 4.0]]


def test_moving_baseline_uses_the_old_one_and_returns_the_new_one() -> None:
    baseline = tensor(2.0)
    advantages, baseline = moving_baseline(tensor([1.0, 3.0, 8.0]), baseline, momentum=0.75)
    assert advantages.tolist() == [-1.0, 1.0, 6.0]
    assert baseline.shape == () and baseline.item() == 0.75 * 2 + 0.25 * 4
    advantages, baseline = moving_baseline(tensor([0.5]), baseline, momentum=0.75)
    assert advantages.tolist() == [0.5 - 2.5] and baseline.item() == 0.75 * 2.5 + 0.25 * 0.5


def test_mixed_groups() -> None:
    keep = mixed_groups(tensor([[0.5, 0.5, 0.4], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [-1.0, 0.5, 2.0]]))
    assert keep.dtype == torch.bool and keep.tolist() == [True, False, False, True]
    assert mixed_groups(tensor([[1.0], [0.0]])).tolist() == [False, False]


EQUAL = [0.7, 12.3, -98765.4, 1e30, 0.0]


@pytest.mark.parametrize("score", EQUAL)
@pytest.mark.parametrize("size", [2, 3, 7, 8, 1000])
def test_equal_scores_have_no_advantage_at_all(score: float, size: int) -> None:
    """In float32 their mean is not they: divided by their deviation, the rounding was of order 1."""
    scores = torch.full((3, size), score)
    for std in ("sample", "population", "none"):
        assert not group_normalise(scores, std=std).any()  # type: ignore[arg-type]
    assert not leave_one_out(scores).any()
    assert not whiten_scores(scores[0]).any()
    assert not whiten(scores, scores == score).any()
    assert torch.equal(whiten_scores(scores[0], shift_mean=False), scores[0])
    advantages, baseline = moving_baseline(scores[0], torch.tensor(score))
    assert not advantages.any() and baseline.item() == scores[0, 0].item()


def test_scores_that_hardly_differ_are_centred_to_their_own_rounding() -> None:
    """Values that float32 holds exactly; a mean in float32 would be wrong by a third of their difference."""
    scores = torch.tensor([[100000.0, 100000.0, 100000.0078125]])
    exact = statistics.fmean(scores[0].tolist())
    expected = [(value - exact) / statistics.stdev(scores[0].tolist()) for value in scores[0].tolist()]
    for found in (group_normalise(scores, eps=0.0)[0], whiten_scores(scores[0], eps=0.0)):
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(expected, rel=1e-6)
    others = [-0.0078125 / 2, -0.0078125 / 2, 0.0078125]
    assert leave_one_out(scores)[0].tolist() == pytest.approx(others, rel=1e-6)
