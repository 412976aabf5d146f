"""Schedules of learning rates against transformers' `get_scheduler`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from hflow.runtime.engines.megatron.learning_rate import LearningRate

LR, TOTAL = 3e-4, 40
# Our options, and the name and the options of transformers' schedule.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "constant": ({"schedule": "constant"}, "constant_with_warmup", {}),
    "linear": ({"schedule": "linear"}, "linear", {}),
    "linear_above": (
        {"schedule": "linear", "min_lr": 1e-5},
        "polynomial",
        {"lr_end": 1e-5, "power": 1.0},
    ),
    "cosine": ({"schedule": "cosine"}, "cosine", {}),
    "cosine_above": ({"schedule": "cosine", "min_lr": 1e-5}, "cosine_with_min_lr", {"min_lr": 1e-5}),
    "wsd": (
        {"schedule": "wsd", "decay_steps": 9},
        "warmup_stable_decay",
        {"num_decay_steps": 9, "decay_type": "linear"},
    ),
    "wsd_above": (
        {"schedule": "wsd", "decay_steps": 9, "min_lr": 3e-5},
        "warmup_stable_decay",
        {"num_decay_steps": 9, "decay_type": "linear", "min_lr_ratio": 0.1},
    ),
}


def theirs(name: str, warmup: int, options: dict[str, Any]) -> list[float]:
    """The rate at which every update of a run is made."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = get_scheduler(name, optimizer, warmup, TOTAL, scheduler_specific_kwargs=options)
    rates: list[float] = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("case", CASES)
def test_rates_are_those_of_transformers(case: str, warmup: int) -> None:
    own, name, options = CASES[case]
    rate = LearningRate.of({"lr": LR, "warmup_steps": warmup, **own}, TOTAL)
    found = [rate.at(update) for update in range(TOTAL)]
    assert found == pytest.approx(theirs(name, warmup, options), rel=1e-9, abs=1e-15)  # float64 both
    begin = own.get("min_lr", 0.0) if own["schedule"] == "wsd" else 0.0
    assert found[0] == pytest.approx(begin if warmup else LR) and max(found) == LR


def test_a_rate_depends_on_the_number_of_the_update_alone() -> None:
    rate = LearningRate(LR, 5, "cosine", 1e-6, 0, TOTAL)
    once = [rate.at(update) for update in range(TOTAL)]
    assert [rate.at(update) for update in reversed(range(TOTAL))] == once[::-1]


def test_a_constant_rate_may_warm_up_beyond_the_end() -> None:
    assert LearningRate(LR, 100, "constant", total=10).at(5) == pytest.approx(LR * 5 / 100)


def test_without_a_schedule_the_first_update_has_a_share_of_the_rate() -> None:
    assert [LearningRate(LR, 4).at(update) for update in range(5)] == [LR / 4, LR / 2, LR * 3 / 4, LR, LR]
