"""Devices shared out among sets, against all ways to do so; and what a search has found early on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.compiler.compile import new_draft
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.effort import EFFORT
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import allocations
from hflow.compiler.planner.search import search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.sharing_out import SharingOut
from hflow.plan.cluster_file import load_cluster
from tests.compiler.workloads import large

EARLY = EFFORT // 8


def space_of(algorithm: str, shape: str, hosts: int, per_host: int, *overrides: str) -> SearchSpace:
    cluster = replace(load_cluster("a100x8"), hosts=hosts, devices_per_host=per_host)
    graph = large(algorithm, shape, *overrides)
    return SearchSpace(candidates(weight_edges(new_draft(graph, cluster))))


def test_it_finds_allocations_about_as_good_as_the_best_of_all() -> None:
    space = space_of("ppo", "llama-7b", 4, 8, "params.batch=256", "params.holdout=64")
    bounds = Bounds(space.draft)
    least, best = LeastTimes(space, bounds), Incumbent(space)
    sharing_out, compared = SharingOut(best, least), 0
    for colocation in space.colocations():
        partition, spread, _ = colocation
        every = list(allocations(partition, list(map(space.sizes, partition)), space.num_devices))
        found = sharing_out.allocation(colocation)
        best_s = min(least.step_s(replace(each, spread=spread)) for each in every)
        assert found and replace(found, spread=frozenset()) in every
        assert best_s <= least.step_s(found) <= 1.1 * best_s
        compared += len(every) > 1
    assert compared > 20


def test_beside_pinned_nodes_no_set_ends_beyond_the_cluster() -> None:
    """There the sets begin at some device, not always the first."""
    cluster = replace(load_cluster("a100x8"), hosts=2)
    draft = new_draft(large("grpo", "llama-7b", "params.holdout=64"), cluster, ("rollout=@4-7",))
    narrow = SearchSpace(candidates(weight_edges(draft)))
    space = SearchSpace(narrow.draft, frozenset(g.name for g in narrow.groups) - {"rollout"}, narrow)
    sharing_out, firsts = SharingOut(Incumbent(space), LeastTimes(space, Bounds(space.draft))), set[int]()
    for found in filter(None, map(sharing_out.allocation, space.colocations())):
        ends = [first + count for first, count in zip(found.firsts, found.counts)]
        assert max(ends) <= space.num_devices
        firsts.add(found.first or 0)
    assert firsts >= {0, 4, 8}


def test_nothing_is_found_where_nothing_is_better_than_the_best() -> None:
    space = space_of("ppo", "llama-7b", 1, 8, "params.batch=256", "params.holdout=64")
    known = search(space, None)
    assert known.choice and known.gap == 0
    best = Incumbent(space, choice=known.choice)
    sharing_out = SharingOut(best, LeastTimes(space, Bounds(space.draft)))
    found = [sharing_out.allocation(each) for each in space.colocations()]
    assert found.count(None) > len(found) // 2


def test_a_large_search_has_a_good_plan_early() -> None:
    """Six small models on 256 GPUs. The first plan, all of them together, takes 1.5 times the bound, and
    without looking ahead it is the only one that is priced by then."""
    sizes = "params.batch=384", "params.minibatch=96", "params.holdout=96"
    space = space_of("safe_rlhf", "qwen3-0.6b", 32, 8, *sizes)
    found = search(space, None, most=EARLY)
    assert found.choice and found.effort >= EARLY
    assert found.choice.step_s < 1.15 * found.bound_s


@pytest.mark.parametrize(("per_host", "count"), [(8, 20), (6, 20), (12, 20)])
def test_rows_that_whole_hosts_do_not_divide_are_generated_on_most_of_their_devices(
    per_host: int, count: int
) -> None:
    """80 rows cannot be shared out equally among 24 devices, with any tp; among 20 they can."""
    sizes = "params.batch=80", "params.minibatch=80", "params.holdout=96"
    space = space_of("ppo", "llama-7b", 24 // per_host, per_host, *sizes)
    assert max(space.draft.candidates["rollout"]) == count
    (whole,) = {c.num_devices for c in space.candidates("rollout", 24)}
    assert whole == count
