"""What is said of places while some sets of devices are not known holds wherever these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from hflow.compiler.planner.bounds.model_places import model_places
from hflow.compiler.planner.bounds.set_places import SetPlaces
from hflow.compiler.planner.placements import Allocation
from hflow.compiler.planner.search_space import SearchSpace
from tests.compiler.small_cases import allocation_in, case, space_of

DRAWS = 30


def allocations_of(space: SearchSpace, random: Random) -> Iterator[tuple[Allocation, Allocation, int]]:
    """Of random colocations, with how many sets are known; and the same with the most devices that the others
    may have."""
    every = list(space.colocations())
    for _ in range(DRAWS):
        whole = allocation_in(space, random.choice(every), random)
        if whole:
            counts, fixed = whole.counts, random.randint(0, len(whole.counts))
            spare = space.num_devices - (whole.first or 0) - sum(counts)
            most = (*counts[:fixed], *(n + spare for n in counts[fixed:]))
            yield whole, replace(whole, counts=most), fixed


def wide(name: str, seed: int, pins: bool) -> SearchSpace | None:
    """On hosts of two devices or four, each node group apart."""
    draft = case(name, seed, 10_000)
    if bool(draft.pins) != pins or draft.cluster.hosts == 1:
        return None
    return SearchSpace(
        draft, frozenset(g.name for g in space_of(draft).groups) - space_of(draft).pinned.keys()
    )


def some(pins: bool) -> Iterator[SearchSpace]:
    for seed in range(16):
        for name in ("ppo", "grpo", "async_grpo"):
            space = wide(name, seed, pins)
            if space:
                yield space


@pytest.mark.parametrize("pins", [False, True])
def test_nodes_on_one_set_have_a_device_in_common(pins: bool) -> None:
    """And where all sets are known, two nodes have one in common only if they are on one set."""
    seen = 0
    for space in some(pins):
        for whole, most, fixed in allocations_of(space, Random(0)):
            on = SetPlaces(space).of(most, fixed)
            assigned = space.assignments(whole)
            sets_of = {n: {*own[0].resources} for n, own in assigned.items() if own}
            groups = [g for g in space.groups if g.name in sets_of]
            for one, other in combinations(groups, 2):
                shared = bool(sets_of[one.name] & sets_of[other.name])
                said = bool({*on[one.nodes[0].name]} & {*on[other.nodes[0].name]})
                assert shared or not said, (whole, fixed, one.name, other.name)
                assert fixed < len(whole.counts) or said == shared
                seen += said and fixed < len(whole.counts)
    assert seen > 100


@pytest.mark.parametrize("pins", [False, True])
def test_models_lie_in_one_of_the_places_that_are_said(pins: bool) -> None:
    """But for whole hosts; most of what is known is known before the last set has devices."""
    early = 0
    for space in some(pins):
        models = {g.model: [other for other in space.groups if other.model == g.model] for g in space.groups}
        per_host = space.draft.cluster.devices_per_host
        for whole, most, fixed in allocations_of(space, Random(1)):
            real = {n: own[0].devices for n, own in space.assignments(whole).items() if own}
            for groups in (each for each in models.values() if all(g.name in real for g in each)):
                names, options = [g.name for g in groups], model_places(space, groups, most, fixed)
                early += bool(options) and fixed < len(whole.counts)
                assert options or fixed < len(whole.counts)
                later = [{real[name][0] - places[name][0] for name in names} for places in options]
                hosts = [all(by >= 0 and by % per_host == 0 for by in each) for each in later]
                assert any(hosts) or not options, (whole, fixed, options, real)
    assert early > 20
