"""Advantages from scores, and the filter on them, against the formulas in Python floats."""

from __future__ import annotations

import statistics

import pytest
import torch

from hflow.ops.advantages import greedy_baseline, group_normalise, leave_one_out
from hflow.ops.baselines import moving_baseline
from hflow.ops.filters import mixed_groups
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
