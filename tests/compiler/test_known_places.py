"""Bounds of allocations that begin alike, on clusters of many hosts, against the price of random plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from random import Random

import numpy as np
import pytest

from hflow.compiler.compile import new_draft
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.assignments import Assignment, Assignments
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.known_places import KnownPlaces
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.model_fronts import ModelParetoFronts
from hflow.compiler.planner.bounds.model_points import ModelPoints, models_s
from hflow.compiler.planner.bounds.reader_moves import ReaderMoves
from hflow.compiler.planner.colocation_prefix import ColocationPrefix
from hflow.compiler.planner.full_assignment import FullAssignment, fastest_configs
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Colocation, Partition
from hflow.compiler.planner.search_space import SearchSpace
from hflow.plan.cluster import Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.parameters import num_parameters
from tests.compiler.small_cases import allocation_in, best_step_s
from tests.compiler.workloads import large

PLANS, DRAWS = 25, 6


def wide(algorithm: str, cluster: str, *pins: str) -> SearchSpace:
    """All node groups may be apart."""
    draft = new_draft(large(algorithm, "llama-7b", "params.batch=512"), load_cluster(cluster), pins)
    narrow = SearchSpace(candidates(weight_edges(draft)))
    return SearchSpace(narrow.draft, frozenset(g.name for g in narrow.groups) - narrow.pinned.keys(), narrow)


def drawn(space: SearchSpace, random: Random) -> Allocation | None:
    """Some allocation, in which all that is on all devices runs on all."""
    colocation = random.choice(list(space.colocations()))
    found = allocation_in(space, colocation, random)
    whole = all(max(space.draft.candidates[name]) == space.num_devices for name in colocation.spread)
    return found if whole else None


def took_s(space: SearchSpace, allocation: Allocation, random: Random) -> float:
    """The shortest of some plans; infinite where none of them fits."""
    every, best_s = space.assignments(allocation), float("inf")
    for _ in range(DRAWS if all(every.values()) else 0):
        chosen: Assignments = {name: random.choice(own) for name, own in every.items()}
        configs = fastest_configs(space, chosen)
        if configs:
            best_s = min(best_s, best_step_s(space, chosen, configs))
    return best_s


@pytest.mark.parametrize(
    ("algorithm", "cluster", "pins", "share"),
    [
        ("ppo", "h100x64", (), 0.5),
        ("async_grpo", "h100x16", (), 0.0),  # nothing waits for weights of the step before
        ("ppo", "a100x64", ("actor_train=@0-63",), 0.5),
    ],
)
def test_no_plan_is_shorter_than_a_bound_of_how_it_begins(
    algorithm: str, cluster: str, pins: tuple[str, ...], share: float
) -> None:
    """However many of its sets are known. Weights that move make a share of the bounds closer, also where the
    places of their trainer and reader are not known."""
    space, random = wide(algorithm, cluster, *pins), Random(0)
    best = Incumbent(space, choice=FullAssignment({}, {}, 1e12))
    least = LeastTimes(space, Bounds(space.draft))
    known = KnownPlaces(best, least, ModelParetoFronts(best))
    shortest = ColocationPrefix.shortest(list(space.colocations()))
    plans, closer, bounds = 0, 0, 0
    while plans < PLANS:
        allocation = drawn(space, random)
        real_s = took_s(space, allocation, random) if allocation else float("inf")
        if not allocation or real_s == float("inf"):
            continue
        plans, counts = plans + 1, allocation.counts
        spare = space.num_devices - (allocation.first or 0) - sum(counts)
        for fixed in range(len(counts) + 1):
            most = (*counts[:fixed], *(n + spare for n in counts[fixed:]))
            begun = Allocation(allocation.partition, most, allocation.spread, allocation.first)
            times_s, moves_s = least.step_s(begun, fixed), known.step_s(begun, fixed)
            assert max(times_s, moves_s) <= real_s * (1 + 1e-9), (allocation, fixed)
            closer, bounds = closer + (moves_s > times_s * 1.001), bounds + 1
        for prefix in prefixes(shortest, allocation):
            rest_s, times_s, moves_s = ungrouped_s(prefix, counts, least, known)
            assert max(rest_s, times_s, moves_s) <= real_s * (1 + 1e-9), (allocation, prefix.length)
            closer, bounds = closer + (moves_s > times_s * 1.001), bounds + 1
    assert closer >= bounds * share


def prefixes(shortest: Sequence[ColocationPrefix], allocation: Allocation) -> Iterator[ColocationPrefix]:
    """Those of its colocation that some other one has too."""
    spread, first = allocation.spread, allocation.first
    prefix = next(each for each in shortest if each.colocation[1:] == (spread, first))
    for members in allocation.partition:
        if prefix.ungrouped:
            yield prefix
        prefix = dict(prefix.longer)[members]


def ungrouped_s(
    prefix: ColocationPrefix, counts: Sequence[int], least: LeastTimes, known: KnownPlaces
) -> tuple[float, float, float]:
    """Bounds of all that begin with these sets of so many devices, whatever the rest does: by what the rest
    has to do, by the step, and with weights that move."""
    partition, spread, first = prefix.colocation
    fixed = tuple(counts[: prefix.length])
    left = least.space.num_devices - (first or 0) - sum(fixed)
    begun = Allocation(partition, (*fixed, *(left for _ in prefix.rest)), spread, first)
    step_s = least.step_s(begun, prefix.length)
    moves_s = known.step_s(begun, prefix.length, ungrouped=True)
    return least.ungrouped_s(prefix.rest, spread, left), step_s, moves_s


@pytest.mark.parametrize(("engine", "readers"), [("megatron", []), ("sglang", ["rollout"])])
def test_on_the_same_devices_only_a_server_has_weights_that_surely_move(
    engine: str, readers: list[str]
) -> None:
    options = PlannerOptions(engines=(f"rollout={engine}",))
    draft = new_draft(large("grpo", "llama-7b"), load_cluster("h100x16"), options=options)
    space = SearchSpace(candidates(weight_edges(draft)))
    moves = ReaderMoves(Incumbent(space))
    together = next(c for c in space.colocations() if len(c.partition) == 1 and not c.spread)
    limits = dict.fromkeys((g.name for g in space.groups), space.capacity)
    found = dict(moves.points(Allocation(together.partition, (16,)), 1, limits))
    assert list(found) == readers
    assert all((points.moves[:, 0] > 0).all() and points.nodes[0] == name for name, points in found.items())


def test_new_weights_wake_a_server_that_slept() -> None:
    """In what is known before assignments are chosen, and in each of them."""
    options = PlannerOptions(engines=("rollout=sglang",))
    told: list[list[float]] = []
    for wake in (None, Link(10e9, 5.0)):
        cluster = replace(load_cluster("h100x16"), wake=wake)
        draft = new_draft(large("grpo", "llama-7b"), cluster, options=options)
        space = SearchSpace(candidates(weight_edges(draft)))
        together = next(c for c in space.colocations() if len(c.partition) == 1 and not c.spread)
        allocation = Allocation(together.partition, (16,))
        limits = dict.fromkeys((g.name for g in space.groups), space.capacity)
        found = dict(ReaderMoves(Incumbent(space)).points(allocation, 1, limits))
        (rollout,) = (group for group in space.groups if group.name == "rollout")
        places = space.assignments(allocation)
        trained = {"actor_train": places["actor_train"][0]}
        syncs = (space.weight_syncs.of(rollout, place, trained) for place in places["rollout"])
        told.append([sync.seconds for sync in syncs if sync])
        told[-1].append(found["rollout"].moves[:, 0].min())
    seconds = 5.0 + 2 * num_parameters(NAMED_SHAPES["llama-7b"]) / 10e9
    assert len(told[0]) > 3 and told[1] == pytest.approx([soon + seconds for soon in told[0]])


def test_a_part_of_the_devices_that_may_be_all_says_nothing() -> None:
    """The reader may be where its trainer is, if that runs on no more devices than its set has."""
    space = wide("ppo", "h100x16")
    few = {n: own for n, own in space.draft.candidates["critic_train"].items() if n <= 8}
    scarce = replace(space.draft, candidates={**space.draft.candidates, "critic_train": few})
    limits = dict.fromkeys((g.name for g in space.groups), space.capacity)
    spread = frozenset(g.name for g in space.groups) - {"values"}
    for draft, surely in ((space.draft, True), (scarce, False)):
        moves = ReaderMoves(Incumbent(SearchSpace(draft, space.apart)))
        found = dict(moves.points(Allocation((("values",),), (8,), spread), 1, limits))
        assert ("values" in found) == surely


def moving(
    space: SearchSpace, partition: Partition, counts: tuple[int, ...], fixed: int = 1, ungrouped: bool = False
) -> set[str]:
    """Readers of new weights to which these surely move. What is in no set is on all devices."""
    rest = frozenset(g.name for g in space.groups) - {*chain(*partition)}
    limits = dict.fromkeys((g.name for g in space.groups), space.capacity)
    allocation = Allocation(partition, counts, rest)
    return {name for name, _ in ReaderMoves(Incumbent(space)).points(allocation, fixed, limits, ungrouped)}


def test_parts_that_may_share_devices_move_nothing_for_sure() -> None:
    space = wide("ppo", "h100x16")
    partition = (("ref_logprobs",), ("critic_train",), ("values",))
    assert "values" in moving(space, partition, (8, 8, 8))
    assert "values" not in moving(space, partition, (8, 8, 8), ungrouped=True)
    assert "values" in moving(space, partition, (8, 8, 8), fixed=2, ungrouped=True)  # not with its trainer


def test_readers_that_may_share_a_copy_of_the_weights_receive_nothing_for_sure() -> None:
    """Of two readers of one trainer only those that are certainly on different devices have copies of their
    own."""
    space = wide("async_grpo", "h100x16")
    both = {"rollout", "actor_logprobs"}
    names = ("rollout",), ("actor_logprobs",), ("actor_train",)
    assert moving(space, names, (4, 4, 8), fixed=3) == both
    assert not moving(space, (("rollout", "actor_logprobs"), ("actor_train",)), (8, 8), fixed=2)
    assert moving(space, names[1:], (4, 12), fixed=2) == both  # the rollout on all 16
    assert not moving(space, (("actor_train",),), (8,), fixed=1)  # both on all
    few = {n: own for n, own in space.draft.candidates["rollout"].items() if n <= 4}
    scarce = replace(space.draft, candidates={**space.draft.candidates, "rollout": few})
    assert not moving(SearchSpace(scarce, space.apart), names[1:], (4, 12), fixed=2)


def test_copies_in_two_places_are_two() -> None:
    """Also where weights take as long to both."""
    space = wide("ppo", "h100x64")
    (values,) = (group for group in space.groups if group.name == "values")
    (reader, *_), (trainer, *_) = (space.candidates(name, 8) for name in ("values", "critic_train"))
    trained = {"critic_train": Assignment(trainer, tuple(range(8)), ())}
    there = [Assignment(reader, tuple(range(first, first + 8)), ()) for first in (16, 32, 32)]
    near, far, again = (space.weight_syncs.of(values, each, trained) for each in there)
    assert near and far and again and near.seconds == far.seconds
    assert near.copy != far.copy == again.copy


def test_all_models_together_are_bounded_by_the_busiest_set() -> None:
    """Each has its best point: what two of them take more than their least, and move, adds up."""
    space = wide("ppo", "h100x16")
    bounds = Bounds(space.draft)
    times, places = dict.fromkeys(bounds.nodes, 1.0), dict.fromkeys(bounds.nodes, (0,))
    least_s = bounds.step_s(times, places)
    nan = float("nan")
    actor = ModelPoints(
        ("actor_train", "rollout"),
        np.array([[1.0, 3.0], [1.0, 1.5], [2.0, 1.0]]),
        np.array([[nan, nan], [nan, 0.25], [nan, nan]]),
    )
    critic = ModelPoints(("critic_train", "values"), np.array([[1.0, 1.0]]), np.array([[nan, 0.5]]))
    more_s = min(2.0, 0.75, bounds.rounds["actor_train"] * 1.0) + 0.5
    found_s = models_s(bounds, [actor, critic], times, places, float("inf"))
    assert found_s == pytest.approx(least_s + more_s) and models_s(bounds, [], times, places, 1e9) == least_s
    nowhere = ModelPoints(actor.nodes, actor.times[:0], actor.moves[:0])
    assert models_s(bounds, [actor, nowhere], times, places, 1e9) == float("inf")
    assert len(ModelPoints.joined([actor, nowhere])) == 3


def test_a_set_on_all_devices_is_searched_in_one_colocation() -> None:
    """No plan is lost by that: without it, the same ones are found again and again."""
    for algorithm, pins in (("grpo", ()), ("ppo", ()), ("ppo", ("actor_train=@0-7",))):
        space = wide(algorithm, "h100x8", *pins)
        single = [each for each in space.colocations() if len(each.partition) == 1]
        whole = [each for each in single if space.shared_out(each) == space.num_devices]
        parts = [each for each in single if each not in whole]
        assert parts and all(each.spread for each in parts)
        assert {_devices(space, each) for each in parts} == {_devices(space, each) for each in whole}


def _devices(space: SearchSpace, colocation: Colocation) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Those of each node group, if the set of a colocation has all."""
    allocation = Allocation(colocation.partition, (space.num_devices,), colocation.spread, colocation.first)
    return tuple((name, each[0].devices) for name, each in space.assignments(allocation).items())
