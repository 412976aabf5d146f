"""What sets of devices do at least in their memory, against all choices."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.compiler.planner.bounds.assignment_tables import NEVER
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.knapsack import least_work
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.work_in_memory import WorkCurves, WorkInMemory
from hflow.compiler.planner.full_assignment import fastest_configs
from hflow.compiler.planner.placements import Colocation
from hflow.compiler.planner.search_space import SearchSpace
from tests.compiler.small_cases import GRAPHS, allocation_in, scarce_case, space_of

CAPACITY, STEPS, FOREVER = 20, 3, float("inf")
SPACES, DRAWS = 6, 40


@st.composite
def curves(draw: st.DrawFn) -> WorkCurves:
    """Whole numbers, so that many are equal."""
    count = draw(st.integers(1, 4))
    idle = np.array([draw(st.integers(0, CAPACITY)) for _ in range(count)], dtype=np.int64)
    starts = np.full((STEPS, count), NEVER, dtype=np.int64)
    seconds = np.full(starts.shape, np.inf)
    for number in range(count):
        steps = draw(st.integers(1, STEPS))
        needs = draw(st.sets(st.integers(0, CAPACITY), min_size=steps, max_size=steps))
        times = draw(st.sets(st.integers(1, 9), min_size=steps, max_size=steps))
        starts[:steps, number], seconds[:steps, number] = sorted(needs), sorted(times, reverse=True)
    return WorkCurves(idle, starts, seconds)


def _exactly_s(every: list[WorkCurves]) -> float:
    """Of all choices, each of which leaves some memory to work in."""
    best_s = FOREVER
    for chosen in product(*(range(len(each.idle)) for each in every)):
        free = CAPACITY - sum(int(each.idle[n]) for each, n in zip(every, chosen))
        if free >= 0:
            best_s = min(best_s, sum(float(each.within(free)[n]) for each, n in zip(every, chosen)))
    return best_s


@given(st.lists(curves(), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_choice_does_less(every: list[WorkCurves]) -> None:
    """With as many intervals as there are bytes, the least is found; with a limit, one that is not below it
    may be said in its place."""
    exactly_s, found_s = _exactly_s(every), WorkInMemory(every, CAPACITY).least_s(FOREVER)
    at_once_s = sum(float(each.within(CAPACITY).min()) for each in every)
    assert at_once_s <= found_s <= exactly_s
    for limit_s in (1.0, 10.0, 20.0):
        limited_s = WorkInMemory(every, CAPACITY).least_s(limit_s)
        assert limited_s <= exactly_s or min(limited_s, exactly_s) >= limit_s


@given(st.lists(curves(), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_the_least_is_found_in_the_end(every: list[WorkCurves]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hflow.compiler.planner.bounds.work_in_memory.HALVINGS", 2 * CAPACITY)
        assert WorkInMemory(every, CAPACITY).least_s(FOREVER) == _exactly_s(every)


@given(st.lists(curves(), min_size=1, max_size=4), st.integers(0, 2 * CAPACITY))
@settings(max_examples=100, deadline=None)
def test_the_least_work_is_that_of_some_choice(every: list[WorkCurves], most: int) -> None:
    tables = [(each.idle, each.seconds[0]) for each in every]
    choices = [tuple(map(sum, zip(*chosen))) for chosen in product(*(zip(*table) for table in tables))]
    fitting = [(seconds, kept) for kept, seconds in choices if kept <= most]
    found_s, kept = least_work(tables, most, FOREVER)
    assert found_s == min((seconds for seconds, _ in fitting), default=FOREVER)
    assert found_s == FOREVER or (found_s, kept) in fitting


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_no_plan_does_less_on_any_of_its_sets(name: str) -> None:
    """On devices with hardly enough memory, where it is more than what each node group does at best; each
    node group in a place of its own, too."""
    closer = 0
    for seed in range(SPACES):
        random, space = Random(seed), space_of(scarce_case(name, seed, 2_000))
        names = frozenset(u.name for u in space.groups) - space.pinned.keys()
        wide = SearchSpace(space.draft, names) if seed % 2 and not space.sharing else space
        least, every = LeastTimes(wide, Bounds(wide.draft)), list(wide.colocations())
        for chosen in random.choices(every, k=DRAWS):
            closer += _held_to_a_plan(wide, least, chosen, random)
    assert closer or name not in ("ppo", "safe_rlhf")


def _held_to_a_plan(space: SearchSpace, least: LeastTimes, chosen: Colocation, random: Random) -> int:
    """Of how many sets of a random plan more is said than of its node groups alone."""
    allocation = allocation_in(space, chosen, random)
    if not allocation:
        return 0
    places = {name: random.choice(each) for name, each in space.assignments(allocation).items() if each}
    configs = fastest_configs(space, places) if len(places) == len(space.groups) else None
    if not configs:
        return 0
    closer, spread = 0, allocation.spread
    for members, count in zip(allocation.partition, allocation.counts):
        on = [g for g in space.groups if g.name in spread or g in space.free_groups(members)]
        work_s = sum(
            space.rounds[n.name] * (configs[n.name].time_s + places[g.name].candidate.swap_s)
            for g in on
            for n in g.nodes
        )
        found_s = least.set_work_s(members, count, spread, FOREVER)
        assert found_s <= work_s * (1 + 1e-9), (members, count, spread)
        closer += found_s > least.busy_s(members, count, spread) * 1.001
    return closer
