"""Safe-RLHF's multiplier and advantages against the formulas in Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from hflow.ops.constraints import lagrange_multiplier, lagrangian
from tests.ops.examples import PER_TOKEN, VALUES, tensor


def test_the_multiplier_over_several_steps() -> None:
    log_multiplier, expected = tensor(math.log(0.5)), math.log(0.5)
    for costs in ([1.0, 2.0, 6.0], [-4.0, 0.0], [0.25]):
        log_multiplier, multiplier, mean = lagrange_multiplier(
            tensor(costs), log_multiplier, lr=0.2, threshold=0.25
        )
        assert mean.item() == pytest.approx(sum(costs) / len(costs), abs=1e-12)
        expected += 0.2 * math.exp(expected) * (mean.item() - 0.25)
        assert log_multiplier.item() == pytest.approx(expected, abs=1e-12)
        assert multiplier.item() == pytest.approx(math.exp(expected), abs=1e-12)
        assert log_multiplier.shape == multiplier.shape == mean.shape == ()


def test_costs_at_the_threshold_leave_the_multiplier_alone() -> None:
    log_multiplier, multiplier, _ = lagrange_multiplier(tensor([1.0, 3.0]), tensor(0.0), threshold=2.0)
    assert (log_multiplier.item(), multiplier.item()) == (0.0, 1.0)


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 4.0])
def test_lagrangian(multiplier: float) -> None:
    found = lagrangian(tensor(PER_TOKEN), tensor(VALUES), tensor(math.log(multiplier)))
    for row, (rewards, costs) in enumerate(zip(PER_TOKEN, VALUES)):
        expected = [(r - multiplier * c) / (1 + multiplier) for r, c in zip(rewards, costs)]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
    assert lagrangian(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(0.0)).dtype == torch.float32
