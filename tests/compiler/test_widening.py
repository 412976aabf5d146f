"""The wider search finds what pricing every plan of the wider space finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from hflow.compiler.options import PlannerOptions
from hflow.compiler.planner.full_assignment import FullAssignment
from hflow.compiler.planner.placements import Allocation, Colocation
from hflow.compiler.planner.search import BestFirstSearch, SearchResult, exhaustive, search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.widening import widening
from hflow.compiler.state import Draft
from tests.compiler.small_cases import GRAPHS, case, num_plans_of

CASES, MOST = 4, 3000  # of each graph, with so many plans at most
FOREVER = float("inf")


def wider_spaces(name: str) -> list[SearchSpace]:
    """Of the first cases in which all node groups may be apart and there are not too many plans."""
    found = (_wider(case(name, seed, most=60)) for seed in range(12))
    return list(islice((s for s in found if s and num_plans_of(s, MOST) <= MOST), CASES))


def _wider(draft: Draft) -> SearchSpace | None:
    free = replace(draft, options=PlannerOptions())
    groups = SearchSpace(free).groups
    names = frozenset(g.name for g in groups) - SearchSpace(free).pinned.keys()
    return SearchSpace(free, names) if len(names) <= 4 else None


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in GRAPHS if "ppo" not in n and n != "safe_rlhf"])
def test_search_finds_the_best_of_the_wider_space(name: str) -> None:
    spaces = wider_spaces(name)
    assert spaces
    for space in spaces:
        expected, proven = exhaustive(space), search(space, FOREVER, resolution=0.0)
        assert (expected.choice is None) == (proven.choice is None)
        if expected.choice and proven.choice:
            assert proven.choice.step_s == pytest.approx(expected.choice.step_s, rel=1e-9)
            assert proven.gap == 0


@pytest.mark.parametrize("name", ["async_grpo", "remax"])
def test_both_searches_together_find_what_enumeration_finds(name: str) -> None:
    for seed in range(3):
        draft = replace(case(name, seed, most=60), options=PlannerOptions())
        found = widening(SearchSpace(draft), lambda s, known: search(s, FOREVER, 0.0, known))
        expected = widening(SearchSpace(draft), exhaustive)
        assert (found.choice is None) == (expected.choice is None)
        if found.choice and expected.choice:
            assert found.choice.step_s == pytest.approx(expected.choice.step_s, rel=1e-9)
            assert found.gap == 0 and found.bound_s <= found.choice.step_s


def test_a_search_that_goes_on_ends_where_one_without_a_pause_does() -> None:
    """After twice the effort each time: what is paused within one allocation is begun anew."""
    pauses = 0
    for seed in range(8):
        space = SearchSpace(replace(case("ppo", seed, most=2000), options=PlannerOptions()))
        paused, at_once, steps = (
            BestFirstSearch(space, resolution=0.0),
            search(space, FOREVER, 0.0),
            list[float](),
        )
        for most in (1000 * 2**pause for pause in range(16)):
            found = paused.go_on(most)
            steps += [found.choice.step_s] if found.choice else []
            if not found.gap:
                break
        assert bool(found.choice) == bool(at_once.choice) and found.gap == at_once.gap == 0
        if at_once.choice:
            assert steps == sorted(steps, reverse=True) and steps[-1] == at_once.choice.step_s
            pauses += len(steps)
    assert pauses > 10


@pytest.mark.slow
def test_a_wider_search_of_all_plans_proves_what_the_first_one_left() -> None:
    """The first one ends as soon as it has a plan. Where the wider one has all node groups apart, no gap is
    left."""
    whole = 0
    for name in ("async_grpo", "ppo"):
        for seed in range(4):
            space = SearchSpace(replace(case(name, seed, most=60), options=PlannerOptions()))
            widened: list[frozenset[str]] = []

            def soon(space: SearchSpace, known: FullAssignment | None) -> SearchResult:
                widened.append(space.apart)  # noqa: B023
                return BestFirstSearch(space, resolution=0.0, known=known).go_on(
                    FOREVER if space.apart else 0
                )

            found = widening(space, soon)
            if widened[1:] and widened[1] == {g.name for g in space.groups} - space.pinned.keys():
                expected = widening(space, exhaustive)
                assert (found.choice is None) == (expected.choice is None) and found.gap == 0
                if found.choice and expected.choice:
                    assert found.choice.step_s == pytest.approx(expected.choice.step_s, rel=1e-9)
                    whole += 1
    assert whole > 1


def test_the_wider_space_has_every_place_once() -> None:
    """Each of three node groups shares a set with any others, or is on all devices."""
    draft = replace(case("grpo", 0, most=60), options=PlannerOptions(), pins=())
    narrow = SearchSpace(draft)
    names = tuple(g.name for g in narrow.groups)
    wider = SearchSpace(draft, frozenset(names))
    found = list(wider.colocations())
    assert len(names) == 3 and len(found) == len({*found})
    # Bell's number of four: partitions of three into sets and one on all devices; less that of nothing else.
    assert len(found) == 15 - 1
    assert Colocation((("rollout",),), frozenset({*names} - {"rollout"})) in found


def test_sets_beside_pinned_nodes_lie_in_their_order() -> None:
    partition = (("a",), ("b",))
    assert Allocation(partition, (1, 2)).firsts == (2, 0)
    assert Allocation(partition, (1, 2), first=3).firsts == (3, 4)
