"""The line of a step."""

from __future__ import annotations

from hflow.runtime.controller.progress import numbers

TIMES = {"tokens_per_s": 5321.4, "time_s": 0.812}


def test_one_loss_needs_no_name() -> None:
    metrics = {"loss.actor_train": -0.0012, "reward_mean": 0.42, **TIMES}
    assert numbers(metrics) == "reward 0.420  loss -0.0012  5,321 tokens/s  0.81 s"


def test_several_losses_are_named() -> None:
    metrics = {"loss.critic_train": 0.5, "loss.actor_train": -0.0012, **TIMES}
    expected = "loss.critic_train +0.5000  loss.actor_train -0.0012  5,321 tokens/s  0.81 s"
    assert numbers(metrics) == expected
