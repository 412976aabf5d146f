"""The line of a step, and what runs now."""

from __future__ import annotations

from io import StringIO
from threading import Event

import pytest
from rich.console import Console

from hflow.runtime.controller import progress
from hflow.runtime.controller.progress import RunProgress, numbers

TIMES = {"tokens_per_s": 5321.4, "time_s": 0.812}


def test_one_loss_needs_no_name() -> None:
    metrics = {"loss.actor_train": -0.0012, "reward_mean": 0.42, **TIMES}
    assert numbers(metrics) == "reward 0.420  loss -0.0012  5,321 tokens/s  0.81 s"


def test_several_losses_are_named() -> None:
    metrics = {"loss.critic_train": 0.5, "loss.actor_train": -0.0012, **TIMES}
    expected = "loss.critic_train +0.5000  loss.actor_train -0.0012  5,321 tokens/s  0.81 s"
    assert numbers(metrics) == expected


def test_the_node_that_runs_is_recorded_when_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_POLL_S", 0.001)
    places = iter(["", "prompts", "rollout", "rollout", "actor_train"])
    recorded, done = list[str](), Event()

    def where() -> str:
        place = next(places, "")
        if not place and recorded:
            done.set()
        return place

    with RunProgress(3, where, Console(file=StringIO()), recorded.append):
        assert done.wait(60)
    assert recorded[:3] == ["prompts", "rollout", "actor_train"]
