"""Which trainers give their weights' memory to a copy of them, and what is then on the devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hflow
from hflow.compiler.memory import device_memory
from hflow.compiler.regroup import generation_mesh
from hflow.compiler.state import Draft
from hflow.cost.redistribution import includes
from hflow.graph.ir import Graph
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.program import Call, Program, Release, SyncWeights
from hflow.plan.sharding import Sharding
from tests.compiler.test_memory import DATA, HALF, MB, TENSOR, lagged, planned

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
    assert memory["actor gradients, Adam (tp2 @0-1)"] == 12 * HALF
    assert "actor weights (dp2 @0-1)" in memory


def test_both_are_there_while_weights_move(ppo: Graph) -> None:
    """The least that the devices hold then, whatever the reader itself needs afterwards."""
    memory = _peak(*planned(ppo, meshes={"actor_train": TENSOR}), working := 1000)
    assert memory["actor weights, gradients, Adam (tp2 @0-1)"] + working == 16 * HALF


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
    assert includes(Sharding(generate), Sharding(train))


@given(*[SIZES] * 5)
def test_a_part_is_included_where_each_parameters_box_is(
    pp: int, dp: int, tp: int, pp_g: int, tp_g: int
) -> None:
    count = pp * dp * tp
    assume(count % (pp_g * tp_g) == 0 and count <= 64)
    devices = tuple(range(count))
    part = Sharding(Mesh.of(devices, pp=pp, dp=dp, tp=tp))
    whole = Sharding(Mesh.of(devices, pp=pp_g, dp=count // (pp_g * tp_g), tp=tp_g))
    every = [(weight_boxes(SHAPE, whole, p), weight_boxes(SHAPE, part, p)) for p in parameters(SHAPE)]
    inside = all(
        device in wide and all(a >= c and b <= d for (a, b), (c, d) in zip(box, wide[device]))
        for wide, narrow in every
        for device, box in narrow.items()
    )
    assert includes(whole, part) == inside


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
