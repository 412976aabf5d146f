"""Which plans a better order of work is searched longer for."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from hflow.compiler.planner.full_assignment import fastest_configs
from hflow.compiler.planner.incumbent import TOLD, Incumbent
from hflow.schedule.task_times import Order, Task
from tests.compiler.small_cases import all_allocations, case, space_of


def test_where_longer_searches_gained_nothing_only_a_new_best_is_worth_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until so many gained nothing, all that might become the best with an order that is much better are."""
    asked: list[int] = []

    def in_vain(tasks: Sequence[Task], order: Order) -> Order:
        asked.append(len(tasks))
        return order

    monkeypatch.setattr("hflow.compiler.planner.incumbent.searched", in_vain)
    monkeypatch.setattr("hflow.compiler.planner.incumbent.busiest_s", lambda _: 0.0)
    space, random = space_of(case("ppo", 1, 10_000)), Random(0)
    choices, best = list(all_allocations(space)), Incumbent(space)
    for _ in range(300):
        places = space.assignments(random.choice(choices))
        chosen = {name: random.choice(each) for name, each in places.items()}
        told, limit_s, before = len(best.gains) >= TOLD, best.limit_s, len(asked)
        if not fastest_configs(space, chosen):
            continue
        best.offer(chosen)
        if told and len(asked) > before:
            assert best.choice and best.choice.step_s < limit_s
    assert best.gains == [0.0] * len(asked) and TOLD <= len(asked) < best.explored / 2
