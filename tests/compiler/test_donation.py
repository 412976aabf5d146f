"""Which trainers give their weights' memory to a copy of them, and what is then on the devices."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hflow
from hflow.compiler.candidates.node_groups import ExecConfig
from hflow.compiler.compile import compile_graph
from hflow.compiler.memory import device_memory
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.lower_edges import lower_edges
from hflow.compiler.passes.place import node_plans
from hflow.compiler.passes.schedule import schedule
from hflow.compiler.planner.assignments import Assignments
from hflow.compiler.planner.full_assignment import fastest_configs
from hflow.compiler.regroup import generation_mesh
from hflow.compiler.state import Draft
from hflow.cost.resident_memory import resident_bytes
from hflow.cost.weight_cells import includes
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.pipeline_stages import stage_sizes
from hflow.plan.program import Call, Program, Release, SyncWeights
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import Strategy
from tests.compiler.small_cases import GRAPHS, all_allocations, case, space_of, with_memory
from tests.compiler.test_infeasible import cluster, refusal
from tests.compiler.test_memory import DATA, HALF, MB, TENSOR, lagged, planned
from tests.compiler.workloads import large

SHAPE = ModelShape("llama", 8, 64, 8, 8, 8, 128, 64, 64, 1e4, 1e-6, False, False)


def moves(draft: Draft, model_of: str) -> list[SyncWeights | Release]:
    """What moves weights to a node, and drops them."""
    assert draft.step
    return [i for i in all_moves(draft.step) if i.node == model_of]


def all_moves(program: Program) -> list[SyncWeights | Release]:
    return [i for i in program.instructions if isinstance(i, SyncWeights | Release)]


def test_a_trainer_lends_to_a_copy_that_holds_its_shards(ppo: Graph) -> None:
    """Nobody uses its weights until the copy is dropped; its training waits for that."""
    draft, _ = planned(ppo, meshes={"actor_train": TENSOR})
    assert draft.step
    weights, release = moves(draft, "rollout")
    assert weights.donates and release.donates
    assert draft.step.donating_edge("rollout").source == "actor_train"
    instructions = draft.step.instructions
    first, last = instructions.index(weights), instructions.index(release)
    assert not any(i.node == "actor_train" for i in instructions[first + 1 : last])
    training = next(i for i in instructions if isinstance(i, Call) and i.node == "actor_train")
    assert last in training.after


@pytest.mark.parametrize(
    ("train", "rollout", "devices"),
    [(DATA, TENSOR, 2), (TENSOR, Mesh.of((2,)), 3), (TENSOR, Mesh.of((0,)), 2)],
    ids=["a larger part", "elsewhere", "on fewer devices"],
)
def test_it_does_not_where_the_copy_holds_less(ppo: Graph, train: Mesh, rollout: Mesh, devices: int) -> None:
    draft, _ = planned(ppo, meshes={"actor_train": train, "rollout": rollout}, devices=devices)
    assert [i.donates for i in moves(draft, "rollout")] == [False, False]


def test_older_weights_are_lent_nothing(model: str) -> None:
    """They stay while the trainer trains."""
    draft, _ = planned(lagged(model), meshes={"actor_train": TENSOR})
    assert [i.donates for i in moves(draft, "rollout")] == [False]


def test_nothing_is_held_twice_while_a_node_needs_as_much(ppo: Graph) -> None:
    """With a working set larger than the trainer's weights, gradients and Adam's state are left of them."""
    memory = _peak(*planned(ppo, meshes={"actor_train": TENSOR}), 500 * MB)
    assert memory["actor gradients, Adam, snapshot (tp2 @0-1)"] == (12 + 12) * HALF
    assert "actor weights (dp2 @0-1)" in memory


def test_both_are_there_while_weights_move(ppo: Graph) -> None:
    """The least that the devices hold then, whatever the reader itself needs afterwards."""
    memory = _peak(*planned(ppo, meshes={"actor_train": TENSOR}), working := 1000)
    assert memory["actor weights, gradients, Adam, snapshot (tp2 @0-1)"] + working == (16 + 12) * HALF


def test_both_are_there_before_a_region_begins(model: str) -> None:
    """Whatever in the region runs before the reader and after it."""
    graph = hflow.load("tests/runtime/graphs/region.yaml", [f"params.model={model}"])
    draft, nodes = planned(graph, meshes={"actor_train": TENSOR})
    assert draft.step and all(i.donates for i in all_moves(draft.step))
    sized = [replace(n, memory_bytes=1000 if n.node == "rollout" else 0) for n in nodes]
    (memory,) = device_memory(draft, sized, [draft.step])
    assert memory.parts["actor weights, gradients, Adam, snapshot (tp2 @0-1)"] + 1000 == (16 + 12) * HALF


def _peak(draft: Draft, nodes: tuple[NodePlan, ...], working: int) -> dict[str, int]:
    """While the rollout runs, the other nodes need nothing."""
    sized = [replace(n, memory_bytes=working if n.node == "rollout" else 0) for n in nodes]
    assert draft.step and draft.evaluation
    (memory,) = device_memory(draft, sized, [draft.step, draft.evaluation])
    assert memory.node == "rollout"
    return dict(memory.parts)


SIZES = st.sampled_from([1, 2, 4, 8])


@given(SIZES, SIZES, SIZES, SIZES)
def test_every_grouping_of_hybridflow_lends(pp: int, dp: int, tp: int, less: int) -> None:
    """Training (p, t, d), generation with a t_g that divides t (arXiv:2409.19256, section 5.3)."""
    assume(tp % less == 0)
    train = Mesh.of(tuple(range(pp * dp * tp)), pp=pp, dp=dp, tp=tp)
    generate = generation_mesh(train, tp // less)
    assert generate
    assert includes(Sharding(generate), Sharding(train), 8)


STAGES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(STAGES, SIZES, SIZES, STAGES, SIZES, SIZES)
def test_a_part_is_included_where_each_parameters_box_is(
    pp: int, dp: int, tp: int, pp_g: int, tp_g: int, kv_heads: int
) -> None:
    shape, count = replace(SHAPE, num_kv_heads=kv_heads), pp * dp * tp
    assume(count % (pp_g * tp_g) == 0 and count <= 64)
    assume(all(stage_sizes(SHAPE.num_layers, number) for number in (pp, pp_g)))
    devices = tuple(range(count))
    part = Sharding(Mesh.of(devices, pp=pp, dp=dp, tp=tp))
    whole = Sharding(Mesh.of(devices, pp=pp_g, dp=count // (pp_g * tp_g), tp=tp_g))
    every = [(weight_boxes(shape, whole, p), weight_boxes(shape, part, p)) for p in parameters(shape)]
    inside = all(
        device in wide and all(a >= c and b <= d for (a, b), (c, d) in zip(box, wide[device]))
        for wide, narrow in every
        for device, box in narrow.items()
    )
    assert includes(whole, part, SHAPE.num_layers) == inside


@given(*[SIZES] * 6)
def test_a_copy_is_no_smaller_than_what_it_is_lent(
    pp: int, dp: int, tp: int, pp_g: int, tp_g: int, split: int
) -> None:
    """So what a node may need with its copy never exceeds what it may need without."""
    count = pp * dp * tp
    assume(count % (pp_g * tp_g) == 0 and count <= 64)
    devices = tuple(range(count))
    train, copy = Mesh.of(devices, pp, dp, tp), Mesh.of(devices, pp_g, count // (pp_g * tp_g), tp_g)
    zero = Strategy(zero=3 if split > 2 else 0)
    assume(includes(Sharding.of(copy), Sharding.of(train, zero), SHAPE.num_layers))
    donated, own = (
        resident_bytes(SHAPE, "bf16", train, False, zero),
        resident_bytes(SHAPE, "bf16", copy, False),
    )
    assert donated <= own


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_the_planner_counts_what_the_check_of_memory_counts(name: str) -> None:
    """Random plans in the least memory that the planner gives them: no more on any device, and donation
    wherever it counts on that."""
    for seed in range(6):
        draft, random = case(name, seed, 10_000), Random(seed)
        for allocation in random.choices(list(all_allocations(space_of(draft))), k=4):
            found = {g: random.choice(own) for g, own in space_of(draft).assignments(allocation).items()}
            least = bisect_left(range(10**9), 1, key=lambda size: bool(_configs(draft, found, size)))
            _agrees(with_memory(draft, least), found)


def _configs(draft: Draft, assignments: Assignments, size: int) -> dict[str, ExecConfig] | None:
    return fastest_configs(space_of(with_memory(draft, size)), assignments)


def _agrees(draft: Draft, assignments: Assignments) -> None:
    space = space_of(draft)
    configs = fastest_configs(space, assignments)
    assert configs
    nodes = node_plans(draft.graph, space.groups, assignments, configs)
    planned = schedule(lower_edges(replace(draft, nodes=nodes)))
    programs = [p for p in (planned.step, planned.evaluation) if p]
    peak = max(m.peak_bytes for m in device_memory(planned, nodes, programs))
    assert peak <= draft.cluster.device.usable_bytes, draft.graph.name
    copies = space.weight_syncs.own_copies(space.groups, assignments)
    for group in (g for g in space.groups if copies[g.name].passing):
        donated = [i.donates for p in programs for i in all_moves(p) if i.node == group.name]
        assert all(donated) or not copies[group.name].donated, (draft.graph.name, group.name)


@pytest.fixture
def tight() -> Cluster:
    """GRPO of 7B has room only where the rollout's weights take that of the actor's."""
    return cluster("a100x16", hosts=2, memory_gb=11 / 0.9, link=False)


def test_a_plan_that_fits_by_donation_alone_is_found(tight: Cluster) -> None:
    plan = compile_graph(large("grpo", "llama-7b"), tight)
    assert max(memory.peak_bytes for memory in plan.memory) <= tight.device.usable_bytes
    donated = [move.donates for move in all_moves(plan.step) if move.node == "rollout"]
    assert donated and all(donated)


def test_without_donation_it_is_refused(tight: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.compiler.planner.weight_syncs.may_donate", lambda *_: False)
    told = refusal(large("grpo", "llama-7b"), tight, options=PlannerOptions("colocate")).help
    assert told.startswith("with each model in one place, some device needs 11.2 GB while `rollout` runs")
    assert "actor weights, gradients, Adam (pp2 tp8 sp) 7.6 GB" in told


def test_what_is_refused_is_told_with_donation() -> None:
    told = refusal(
        large("grpo", "llama-7b"), cluster("a100x16", hosts=2, memory_gb=10 / 0.9, link=False)
    ).help
    assert "needs 10.4 GB" in told and "actor gradients, Adam (pp2 tp8 sp) 6.7 GB" in told


def test_nothing_is_lent_to_a_region_that_needs_both(model: str) -> None:
    """All rounds run between the coming of the copy and its end, also a node that follows its reader."""
    pins = ["rollout=dp4@0-3", "actor_train=tp2,dp2@0-3"]
    donated: list[list[bool]] = []
    for name in ("region", "region_scored"):
        graph = hflow.load(f"tests/runtime/graphs/{name}.yaml", [f"params.model={model}", "params.batch=8"])
        pinned = [*pins, "old=tp2,dp2@0-3"] if name == "region_scored" else pins
        step = hflow.compile(graph, "local4", pinned).step
        donated.append([i.donates for i in all_moves(step)])
    assert donated == [[True, True], [False, False]]


def test_the_plan_of_an_algorithm_says_so(model: str) -> None:
    """With the layouts of the paper's engine, in both programs."""
    graph = hflow.load("algorithms/grpo.yaml", [f"params.model={model}"])
    plan = hflow.compile(graph, "local4", pins=["actor_train=tp2,dp2@0-3", "rollout=dp4@0-3"])
    for program in (plan.step, plan.evaluation):
        assert program
        assert [i.op for i in all_moves(program) if i.donates] == ["weights", "release"]
