"""Lower bounds are below the price of every complete choice, whatever its nodes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hflow.compiler.candidates.node_groups import ExecConfig
from hflow.compiler.planner.assignments import Assignments, all_meshes, shardings
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.descendants import Descendants
from hflow.compiler.planner.bounds.known_places import KnownPlaces
from hflow.compiler.planner.bounds.least import LeastTimes
from hflow.compiler.planner.bounds.model_fronts import ModelParetoFronts
from hflow.compiler.planner.bounds.numbers import FLOATS
from hflow.compiler.planner.bounds.placed_graph import PlacedGraph
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.full_assignment import FullAssignment, fastest_configs
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, Partition
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import PYTHON_CALL_S
from hflow.cost.redistribution import weights_s
from hflow.plan.layout import Mesh
from tests.compiler.small_cases import (
    GRAPHS,
    all_allocations,
    allocation_in,
    best_step_s,
    case,
    space_of,
)

pytestmark = pytest.mark.slow

CASES, DRAWS = 8, 10
ORDER = 0.02  # of a step, which the order of nodes may take


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_no_schedule_beats_a_bound(name: str) -> None:
    """Node times over two decades, a tenth of the nodes far slower; and the bounds say something: half of
    them come within 5 %. No orders of jobs are excluded that a schedule just below a limit has."""
    shares: list[float] = []
    for seed in range(CASES):
        random = Random(seed)
        space = space_of(case(name, seed, 10_000))
        bounds, choices = Bounds(space.draft), list(all_allocations(space))
        for _ in range(DRAWS):
            assignments = _assignments(space, random.choice(choices), random)
            scale = 10 ** random.uniform(-3, 3)
            configs = {node: ExecConfig(0, scale * _factor(random), 1) for node in bounds.nodes}
            times = _node_times(space, assignments, configs)
            places = {n.name: assignments[u.name].resources for u in space.groups for n in u.nodes}
            taking = {node: np.array([seconds]) for node, seconds in times.items()}
            moves = {reader: np.array([seconds]) for reader, seconds in _moves(space, assignments).items()}
            took_s = best_step_s(space, assignments, configs)
            shares.append(bounds.steps_s(taking, places, moves, float("inf"))[0] / took_s)
            above_s = took_s * (1 + 1e-6)
            assert bounds.steps_s(taking, places, moves, above_s)[0] < above_s, (name, seed)
    assert max(shares) <= 1 + 1e-9
    assert sorted(shares)[len(shares) // 2] > 0.95


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_bounds_of_many_choices_are_those_of_each(name: str, seed: int) -> None:
    """One by one, in whatever company, weights that move beside others that do not; and the bound of a choice
    whose weights do not move is what floats give."""
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    bounds, choices = Bounds(space.draft), list(all_allocations(space))
    assignments = _assignments(space, random.choice(choices), random)
    places = {n.name: assignments[u.name].resources for u in space.groups for n in u.nodes}
    moving = [random.choice([{}, _moves(space, assignments)]) for _ in range(DRAWS)]
    times = {node: np.array([_factor(random) for _ in moving]) for node in bounds.nodes}
    moves = {r: np.array([each.get(r, np.nan) for each in moving]) for r in bounds.trainer_of}
    together = bounds.steps_s(times, places, moves, float("inf"))
    enough_s = float(np.median(together))
    cut = bounds.steps_s(times, places, moves, enough_s) >= enough_s
    for number, each in enumerate(moving):
        one = {node: seconds[number : number + 1] for node, seconds in times.items()}
        own = {reader: np.array([seconds]) for reader, seconds in each.items()}
        assert bounds.steps_s(one, places, own, float("inf"))[0] == pytest.approx(together[number])
        assert (bounds.steps_s(one, places, own, enough_s)[0] >= enough_s) == cut[number]
        assert cut[number] or together[number] < enough_s
        if not each:
            floats = {node: float(seconds[0]) for node, seconds in one.items()}
            assert bounds.step_s(floats, places) == pytest.approx(together[number])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_rings_that_are_left_out_say_nothing_more(name: str, seed: int) -> None:
    """Those within a longer one: of all recurrence cycles, also with weights that come from elsewhere, none
    takes longer than the longest of the others."""
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    bounds = Bounds(space.draft)
    whole = {node for node, times in bounds.rounds.items() if times == 1}
    for allocation in random.choices(list(all_allocations(space)), k=DRAWS):
        assignments = _assignments(space, allocation, random)
        places = {n.name: assignments[u.name].resources for u in space.groups for n in u.nodes}
        placed = PlacedGraph(
            bounds.dag, bounds.all_descendants, bounds.lags, bounds.cross_mesh_values, whole, places
        )
        times = {node: _factor(random) for node in bounds.nodes}
        work = {node: seconds * bounds.rounds[node] for node, seconds in times.items()}
        taken = {r.first: _cycle_s(placed, bounds, r, times, work) for r in bounds.all_descendants}
        assert max(taken.values()) == pytest.approx(max(taken[r.first] for r in placed.all_descendants))


def _cycle_s(
    placed: PlacedGraph,
    bounds: Bounds,
    descendants: Descendants,
    times: dict[str, float],
    work: dict[str, float],
) -> float:
    """With weights that come from the trainer's devices to the first node, if it reads any."""
    trainer = bounds.trainer_of.get(descendants.first)
    wide = placed.own[descendants.first] | (placed.own[trainer] if trainer else frozenset())
    return placed.cycle(descendants, wide).least_s(FLOATS, times, work)


def test_sets_that_meet_wait_for_each_other() -> None:
    """PPO with the critic elsewhere: the rollout's tokens go to `values` once the other devices are done with
    the last step. Either `reward` and `ref_logprobs` follow, and `critic_train` waits for both (50 + 164), or
    `reward` is done before (45 + 98 + 58 + 25), or both are, which takes no less."""
    bounds = Bounds(space_of(case("ppo", 0, 10_000)).draft)
    seconds = {"rollout": 58.0, "reward": 25.0, "ref_logprobs": 25.0}
    seconds |= {"values": 45.0, "actor_train": 98.0, "critic_train": 164.0}
    times = {name: np.array([seconds[name]]) for name in bounds.nodes}
    places = {name: (int(name in ("values", "critic_train")),) for name in bounds.nodes}
    calls_s = 0.01  # of the nodes without a model in between
    assert bounds.steps_s(times, places, {}, 214.0)[0] >= 214.0
    assert bounds.steps_s(times, places, {}, 214.0 + calls_s)[0] < 214.0 + calls_s
    assert bounds.steps_s(times, places, {}, float("inf"))[0] < 210.0  # what each set does by itself


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_bounds_of_allocations_hold_for_each_choice(name: str, seed: int) -> None:
    """What `search` cuts an allocation by is below all that its choices take."""
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    least = LeastTimes(space, Bounds(space.draft))
    for allocation in random.choices(list(all_allocations(space)), k=DRAWS):
        assert least.step_s(allocation) <= _step_s(space, allocation, random) * (1 + 1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_bounds_of_allocations_that_begin_alike_hold_for_each_of_them(name: str, seed: int) -> None:
    """Of the first sets the devices are known, and of the others that they are so many together, or that each
    has no more than so many. Fewer known: the bound is no greater, but for calls between nodes of one set."""
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    calls_s = PYTHON_CALL_S * len(space.draft.graph.nodes)
    least = LeastTimes(space, Bounds(space.draft))
    for allocation in random.choices(list(all_allocations(space)), k=DRAWS):
        took_s, sets = _step_s(space, allocation, random), allocation.partition
        spread, bounds = allocation.spread, [least.step_s(allocation)]
        for known in reversed(range(len(sets))):
            rest, counts = sets[known:], allocation.counts
            assert least.shared_out_s(rest, spread, sum(counts[known:])) <= took_s * (1 + 1e-9)
            greater = (*counts[:known], *(random.randint(n, space.num_devices) for n in counts[known:]))
            bounds.append(least.step_s(replace(allocation, counts=greater), known))
        assert max(bounds) <= took_s * (1 + 1e-9)
        assert max(bounds) <= bounds[0] * (1 + 1e-9) + calls_s


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("apart", [False, True])
def test_weights_between_known_places_take_no_longer_than_in_each_choice(name: str, apart: bool) -> None:
    """Of the first sets the devices are known; of the others, that each has no more than so many. Some bounds
    of PPO are above those of least times."""
    closer = 0
    for seed in range(CASES // 2):
        random = Random(seed)
        space = space_of(case(name, seed, 10_000))
        names = frozenset(u.name for u in space.groups) - space.pinned.keys()
        space = SearchSpace(space.draft, names) if apart and not space.sharing else space
        anything = FullAssignment({}, {}, 1e12)
        best, least = Incumbent(space, choice=anything), LeastTimes(space, Bounds(space.draft))
        known = KnownPlaces(best, least, ModelParetoFronts(best))
        for allocation in _some_allocations(space, random):
            took_s, counts = _step_s(space, allocation, random), allocation.counts
            left = space.num_devices - (allocation.first or 0)
            for fixed in range(len(counts) + 1):
                spare = left - sum(counts)
                greater = (*counts[:fixed], *(n + spare for n in counts[fixed:]))
                bound_s = known.step_s(replace(allocation, counts=greater), fixed)
                assert bound_s <= took_s * (1 + 1e-9), (name, seed, allocation, fixed)
                closer += bound_s > least.step_s(replace(allocation, counts=greater), fixed) * 1.001
    assert closer or name != "ppo"


def _some_allocations(space: SearchSpace, random: Random) -> list[Allocation]:
    """Of some colocations, each with as many devices for each set as happen to be left."""
    chosen = random.choices(list(space.colocations()), k=DRAWS)
    return [found for each in chosen if (found := allocation_in(space, each, random))]


def test_what_is_called_on_the_devices_of_a_node_takes_time_too() -> None:
    """Rollouts of another step, on devices of their own: nothing else keeps these busy."""
    space = space_of(case("async_grpo", 0, 10_000))
    bounds, group_of = Bounds(space.draft), space.group_of
    number_of = {group.name: number for number, group in enumerate(space.groups)}
    places = {node: (number_of[group_of[node]],) for node in bounds.nodes}
    meshes = all_meshes(space.draft.graph, {n: Mesh.of(places[n]) for n in bounds.nodes})
    called = [n for n, mesh in meshes.items() if n not in places and mesh.devices == places["rollout"]]
    times = {node: 1.0 if node == "rollout" else 1e-6 for node in bounds.nodes}
    assert called and bounds.step_s(times, places) == pytest.approx(1 + len(called) * PYTHON_CALL_S)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_sharing_out_finds_the_best_way_to(name: str, seed: int) -> None:
    """That in which the busiest set does least, of all."""
    space = space_of(case(name, seed, 10_000))
    least = LeastTimes(space, Bounds(space.draft))
    found: dict[tuple[Partition, frozenset[str]], float] = {}
    for each in all_allocations(space):
        sets = zip(each.partition, each.counts)
        busiest = max((least.busy_s(m, n, each.spread) for m, n in sets), default=0.0)
        kind = each.partition, each.spread
        found[kind] = min(found.get(kind, float("inf")), busiest)
    for (partition, spread), expected in found.items():
        assert least.shared_out_s(partition, spread, space.num_devices) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_a_closer_look_finds_no_more_than_choices_take(name: str, seed: int) -> None:
    """The bound of an allocation in which every model has one of its paces. It leaves out the order of nodes,
    which least times count: these may be longer by a little, when all else is equal."""
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    bounds, fronts = Bounds(space.draft), ModelParetoFronts(Incumbent(space))
    for allocation in random.choices(list(all_allocations(space)), k=DRAWS):
        bound_s = Branch(allocation, Incumbent(space), bounds).bound_s(fronts)
        assert LeastTimes(space, bounds).step_s(allocation) <= bound_s * (1 + ORDER)
        for _ in range(DRAWS):
            assert bound_s <= _step_s(space, allocation, random) * (1 + 1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", GRAPHS)
def test_assignments_that_are_too_slow_change_no_bound_below_the_limit(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of an allocation, with a best plan that is already known and without."""
    monkeypatch.setattr("hflow.compiler.planner.bounds.model_fronts.MANY", 1)
    random = Random(seed)
    space = space_of(case(name, seed, 10_000))
    bounds, free = Bounds(space.draft), Incumbent(space)
    for allocation in random.choices(list(all_allocations(space)), k=DRAWS):
        took_s = _step_s(space, allocation, random)
        best = Incumbent(space, choice=FullAssignment({}, {}, took_s) if took_s < np.inf else None)
        any_s = Branch(allocation, free, bounds).bound_s(ModelParetoFronts(free))
        limited_s = Branch(allocation, best, bounds).bound_s(ModelParetoFronts(best))
        assert min(limited_s, best.limit_s) == pytest.approx(min(any_s, best.limit_s), rel=ORDER)


def _step_s(space: SearchSpace, allocation: Allocation, random: Random) -> float:
    """Of a random choice; infinite where that does not fit."""
    assignments = _assignments(space, allocation, random)
    configs = fastest_configs(space, assignments)
    return best_step_s(space, assignments, configs) if configs else float("inf")


def _node_times(
    space: SearchSpace, assignments: Assignments, configs: Mapping[str, ExecConfig]
) -> dict[str, float]:
    """Seconds of one run of each node, with what it loads and unloads."""
    swaps = {name: assignments[group].candidate.swap_s for name, group in space.group_of.items()}
    return {name: configs[name].time_s + swap_s for name, swap_s in swaps.items()}


def _factor(random: Random) -> float:
    return 100.0 if random.random() < 0.1 else 10 ** random.uniform(-1, 1)


def _assignments(space: SearchSpace, allocation: Allocation, random: Random) -> Assignments:
    return {group: random.choice(assignments) for group, assignments in space.assignments(allocation).items()}


def _moves(space: SearchSpace, assignments: Assignments) -> dict[str, float]:
    """Seconds that weights move to each reader; to one of those that share a copy, and to none of a base."""
    draft, group_of, lie = space.draft, space.group_of, shardings(space.groups, assignments)
    found: dict[str, float] = {}
    seen: set[object] = set()
    graph = draft.graph
    for edge in (e for e in draft.weight_edges if not e.every and not graph.node(e.reader).model_use.base):
        held, lies = lie[group_of[edge.trainer]], lie[group_of[edge.reader]]
        if (edge.model, lies, edge.lag) in seen or (held == lies and not edge.lag):
            continue
        seen.add((edge.model, lies, edge.lag))
        dtype = draft.graph.model(edge.model).weight_dtype
        found[edge.reader] = weights_s(draft.shapes[edge.model], dtype, held, lies, draft.cluster)
    return found
