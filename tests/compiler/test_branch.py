"""Dives: the first plans of an allocation, which a search begins with."""

from __future__ import annotations

import pytest

from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.search_space import SearchSpace
from tests.compiler.small_cases import all_allocations, scarce_case, space_of

SEEDS = 12


def _dived(space: SearchSpace, allocation: Allocation) -> bool:
    best = Incumbent(space)
    Branch(allocation, best, Bounds(space.draft)).dive()
    return best.choice is not None


@pytest.mark.parametrize("name", ["grpo", "remax"])
def test_a_dive_goes_back_where_memory_does_not_suffice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices with hardly enough memory."""
    spaces = [space_of(scarce_case(name, seed, 2_000)) for seed in range(SEEDS)]
    cases = [(space, allocation) for space in spaces for allocation in all_allocations(space)]
    found = [_dived(space, allocation) for space, allocation in cases]
    monkeypatch.setattr("hflow.compiler.planner.branch.TRIES", 0)
    straight = [_dived(space, allocation) for space, allocation in cases]
    assert sum(found) > sum(straight)
    assert all(deep >= plain for deep, plain in zip(found, straight))
