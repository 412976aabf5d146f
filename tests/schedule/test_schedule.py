"""Orders and times of programs, against time lines drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hflow
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.cluster import Link
from hflow.plan.layout import Mesh
from hflow.plan.parameters import num_parameters
from hflow.plan.program import (
    Call,
    Carry,
    Free,
    Instruction,
    Loop,
    Offload,
    Onload,
    Program,
    Recall,
    Release,
    SyncWeights,
    Transfer,
)
from hflow.schedule.arrange import arranged
from hflow.schedule.critical_path import critical_path, idle
from hflow.schedule.tasks import device_classes
from hflow.schedule.timed_span import spans, step_time_s
from tests.compiler.programs import instant, node_plans, scheduled

A, B = (0, 1), (2, 3)
MESH_A, MESH_B = Mesh.of(A, dp=2), Mesh.of(B, dp=2)
BOTH = (*A, *B)
PPO_S = {"rollout": 10, "ref_logprobs": 5, "values": 4, "reward": 3, "actor_train": 7, "critic_train": 8}
CRITICS = ("values", "critic_train", "reward")


def region(model: str, rows: int) -> Graph:
    """A region whose rounds bring six rows each."""
    return hflow.load("tests/runtime/graphs/region.yaml", [f"params.model={model}", f"params.rows={rows}"])


def call(node: str, devices: tuple[int, ...], time_s: float, *after: int) -> Call:
    return Call(node, devices, after=after, time_s=time_s)


def transfer(node: str, devices: tuple[int, ...], time_s: float, *after: int) -> Transfer:
    return Transfer(node, devices, 0, {}, {}, after=after, time_s=time_s)


def sync(node: str, devices: tuple[int, ...], time_s: float, *after: int) -> SyncWeights:
    return SyncWeights(node, devices, 0, after=after, time_s=time_s)


def line(program: Program, steps: int = 1) -> list[tuple[str, float, float]]:
    return [(s.instruction.node, s.start_s, s.end_s) for s in spans(program, steps)]


def program_of(graph: Graph, *instructions: Instruction) -> Program:
    return arranged(Program(graph, (), instructions))


def names(program: Program) -> list[tuple[str, str]]:
    return [(i.op, i.node) for i in program.instructions]


def step_of(draft: Draft) -> Program:
    assert draft.step
    return draft.step


def test_a_transfer_to_idle_devices_comes_before_other_work(grpo: Graph) -> None:
    """B gets its rows before A goes on with `ref`, although the program names `ref` first."""
    program = program_of(
        grpo,
        call("rollout", A, 10.0),
        call("ref", A, 5.0, 0),
        transfer("rows", BOTH, 1.0, 0),
        call("values", B, 4.0, 2),
    )
    assert sorted(line(program)) == [
        ("ref", 11.0, 16.0), ("rollout", 0.0, 10.0), ("rows", 10.0, 11.0), ("values", 11.0, 15.0),
    ]  # fmt: skip
    assert step_time_s(program) == 16.0  # A: 10 + 1 + 5
    assert idle(program) == {A: 0.0, B: 1 - 5 / 16}


def test_onload_call_and_offload_stay_together(grpo: Graph) -> None:
    """What could run on the devices meanwhile does not slip in between."""
    program = program_of(
        grpo,
        call("first", A, 2.0),
        Onload("ref", A, after=(0,), time_s=3.0),
        call("ref", A, 5.0, 0, 1),
        Offload("ref", A, after=(2,), time_s=1.0),
        call("other", A, 9.5, 0),
    )
    assert names(program)[1:4] == [("onload", "ref"), ("call", "ref"), ("offload", "ref")]
    assert [s[1:] for s in line(program)] == [(0, 2), (2, 5), (5, 10), (10, 11), (11, 20.5)]


def test_whoever_has_got_weights_of_its_own_runs_next(grpo: Graph) -> None:
    """Both calls could start at 3 s; the copy of weights does not wait in memory for the quicker one."""
    program = program_of(
        grpo,
        call("prompts", A, 1.0),
        sync("rollout", A, 2.0, 0),
        call("rollout", A, 5.0, 0, 1),
        Release("rollout", A, after=(2,)),
        call("other", A, 3.0, 0),
    )
    at = names(program).index(("weights", "rollout"))
    assert names(program)[at + 1 : at + 3] == [("call", "rollout"), ("release", "rollout")]


def test_new_weights_for_idle_devices_come_before_other_work(grpo: Graph) -> None:
    """B draws 6 s with older weights while A scores and trains, 7 s. Were the weights to come after `ref`, B
    would wait for it: 9 s."""
    program = program_of(
        grpo,
        call("rollout", B, 6.0),
        transfer("ref", BOTH, 0.0, 0),
        call("ref", A, 3.0, 1),
        sync("rollout", BOTH, 0.0, 0),
        call("actor_train", A, 4.0, 2, 3),
    )
    assert step_time_s(program) == 7.0


def test_what_only_drops_makes_no_device_wait(grpo: Graph) -> None:
    """`carry` lies on both groups, but B need not wait for A to keep its own copy."""
    program = program_of(
        grpo,
        call("slow", A, 10.0),
        call("quick", B, 1.0),
        Carry("both", BOTH, {}, 1, after=(0, 1)),
        call("late", B, 1.0, 1),
    )
    assert ("late", 1.0, 2.0) in line(program)
    assert "both" not in [name for name, _, _ in line(program)]


def test_rounds_overlap_on_different_devices(model: str) -> None:
    """Four rounds of 3 s on A, each followed by 2 s on B: B works while A draws the next round."""
    body = call("rollout", A, 3.0), call("even", B, 2.0, 0)
    loop = Loop("sampling", BOTH, body, {})
    program = program_of(region(model, 24), loop, call("actor_train", A, 1.0, 0))
    assert program.instructions[0] == replace(loop, time_s=4 * 3.0 + 2.0)
    told = spans(program)
    assert [(s.path, s.start_s) for s in told if s.instruction.node == "even"] == [
        ((0, round_, 1), 3.0 * (round_ + 1)) for round_ in range(4)
    ]
    assert told[-1].start_s == 14.0
    on_path = [(s.instruction.node, s.time_s) for s in critical_path(program)]
    assert on_path == [*[("rollout", 3.0)] * 4, ("even", 2.0), ("actor_train", 1.0)]


def test_frees_come_after_the_last_use_wherever_that_is(grpo: Graph) -> None:
    """`a` reads `x` after `b` does, because it has to wait for something else."""
    program = program_of(
        grpo,
        Call("made", BOTH, outputs={"x": "x"}, time_s=1.0),
        call("slow", A, 5.0),
        Call("a", A, {"x": "x"}, after=(0, 1), time_s=1.0),
        Call("b", B, {"x": "x"}, after=(0,), time_s=1.0),
    )
    free = program.instructions[-1]
    assert names(program)[-2:] == [("call", "a"), ("free", "a")]
    assert free == Free("a", BOTH, ("x",), after=free.after)


def test_colocated_nodes_add_up(ppo: Graph) -> None:
    draft = scheduled(
        ppo, instant(2), node_plans(ppo, dict.fromkeys((n.name for n in ppo.nodes), MESH_A), PPO_S)
    )
    assert draft.step_time_s == pytest.approx(sum(PPO_S.values()))
    assert idle(step_of(draft)) == {A: pytest.approx(0.0)}
    assert sum(s.time_s for s in critical_path(step_of(draft))) == pytest.approx(draft.step_time_s)


def test_two_groups_of_ppo(ppo: Graph) -> None:
    """On A: rollout, ref, actor_train; on B: reward, values, critic_train. The actor's training needs the
    values: 10 + 3 + 4 + 7. The critic's runs into the next rollout."""
    meshes = {n.name: MESH_B if n.name in CRITICS else MESH_A for n in ppo.nodes}
    draft = scheduled(ppo, instant(4), node_plans(ppo, meshes, PPO_S))
    assert draft.step_time_s == pytest.approx(24.0)
    assert {n.node: n.start_s for n in draft.nodes} == pytest.approx({
        "prompts": 0, "rollout": 0, "reward": 10, "ref_logprobs": 10, "values": 13, "shaped": 17, "gae": 17,
        "advantages": 17, "actor_train": 17, "critic_train": 17,
    })  # fmt: skip
    on_path = [s.instruction.node for s in critical_path(step_of(draft)) if s.time_s]
    assert on_path == ["rollout", "reward", "values", "actor_train"]
    assert idle(step_of(draft)) == {A: pytest.approx(1 - 22 / 24), B: pytest.approx(1 - 15 / 24)}


@pytest.mark.parametrize(("train_s", "rollout_s"), [(7.0, 4.0), (4.0, 7.0)])
@pytest.mark.parametrize(("lag", "period"), [(1, max), (0, lambda *both: sum(both))])
def test_lag_overlaps_training_with_the_next_rollout(
    model: str, train_s: float, rollout_s: float, lag: int, period: object
) -> None:
    """On disjoint devices: the longer of both with `lag`, their sum without."""
    graph = hflow.load("tests/runtime/graphs/lagged.yaml", [f"params.model={model}", f"params.lag={lag}"])
    meshes = {n.name: MESH_A if n.name == "actor_train" else MESH_B for n in graph.nodes}
    times = {"actor_train": train_s, "rollout": rollout_s}
    draft = scheduled(graph, instant(4), node_plans(graph, meshes, times))
    assert draft.step_time_s == pytest.approx(period(train_s, rollout_s))  # type: ignore[operator]
    on_path = {s.instruction.node for s in critical_path(step_of(draft)) if s.time_s}
    assert on_path == (set(times) if not lag else {max(times, key=times.__getitem__)})


def test_older_weights_are_renewed_between_use_and_training(model: str) -> None:
    graph = hflow.load("tests/runtime/graphs/lagged.yaml", [f"params.model={model}"])
    meshes = {n.name: MESH_A if n.name == "actor_train" else MESH_B for n in graph.nodes}
    draft = scheduled(graph, instant(4), node_plans(graph, meshes, {"actor_train": 1.0, "rollout": 1.0}))
    told = names(step_of(draft))
    order = [
        told.index(key) for key in (("call", "rollout"), ("weights", "rollout"), ("call", "actor_train"))
    ]
    assert order == sorted(order)
    assert ("release", "rollout") not in told
    assert draft.evaluation and names(draft.evaluation)[1:3] == [("weights", "rollout"), ("call", "rollout")]
    assert ("release", "rollout") in names(draft.evaluation)


def test_own_weights_come_right_before_the_call_and_go_right_after(ppo: Graph) -> None:
    meshes = {n.name: Mesh.of(A, tp=2) if n.name == "rollout" else MESH_A for n in ppo.nodes}
    draft = scheduled(ppo, instant(2), node_plans(ppo, meshes, PPO_S, offload=("ref_logprobs",)))
    for program in (p for p in (draft.step, draft.evaluation) if p):
        told = [
            name for name in names(program) if name[0] in ("weights", "call", "onload", "offload", "release")
        ]
        at = told.index(("weights", "rollout"))
        assert told[at : at + 3] == [("weights", "rollout"), ("call", "rollout"), ("release", "rollout")]
    onload, offload = (
        next(i for i in step_of(draft).instructions if isinstance(i, kind)) for kind in (Onload, Offload)
    )
    size = 4 * num_parameters(draft.shapes["ref"])  # f32, at 1 GB/s
    assert (onload.time_s, offload.time_s) == (pytest.approx(size / 1e9), 0.0)


def test_an_optimizer_is_moved_both_ways(ppo: Graph) -> None:
    """Two moments in f32 are 8 bytes per parameter."""
    meshes = dict.fromkeys((n.name for n in ppo.nodes), MESH_A)
    draft = scheduled(ppo, instant(2), node_plans(ppo, meshes, PPO_S, offload=("critic_train",)))
    moved = [i.time_s for i in step_of(draft).instructions if isinstance(i, Onload | Offload)]
    assert moved == [pytest.approx(8 * num_parameters(draft.shapes["critic"]) / 1e9)] * 2
    assert draft.step_time_s == pytest.approx(sum(PPO_S.values()) + sum(moved))


def test_trainings_of_one_model_wait_for_each_other_and_for_all_readers(model: str) -> None:
    graph = hflow.load("tests/runtime/graphs/trained_twice.yaml", [f"params.model={model}"])
    meshes = dict.fromkeys((n.name for n in graph.nodes), MESH_A)
    program = step_of(scheduled(graph, instant(2), node_plans(graph, meshes, {"first": 2.0, "again": 1.0})))
    calls = {i.node: n for n, i in enumerate(program.instructions) if isinstance(i, Call)}
    assert calls["first"] in program.instructions[calls["again"]].after


def test_values_are_kept_after_the_earlier_ones_are_recalled(model: str) -> None:
    graph = hflow.load("tests/runtime/graphs/carried.yaml", [f"params.model={model}"])
    meshes = dict.fromkeys((n.name for n in graph.nodes), MESH_A)
    program = step_of(scheduled(graph, instant(2), node_plans(graph, meshes, {"actor_train": 1.0})))
    recalls = {n for n, i in enumerate(program.instructions) if isinstance(i, Recall)}
    assert recalls
    for carry in (i for i in program.instructions if isinstance(i, Carry)):
        assert recalls <= set(carry.after)


def test_moving_a_part_of_an_edge_takes_a_part_of_its_time(ppo: Graph) -> None:
    """`reward` brings tokens and mask to B; `shaped`, there too, reads mask (1 byte per token) and log-probs
    (4 bytes), of which only these move. `advantages` sees the whole batch, so the mask comes once more."""
    meshes = {n.name: MESH_A if n.name in ("prompts", "rollout") else MESH_B for n in ppo.nodes}
    slow = replace(instant(4), intra_host=Link(1e9, 0.0))
    program = step_of(scheduled(ppo, slow, node_plans(ppo, meshes, PPO_S)))
    moves = [i for i in program.instructions if isinstance(i, Transfer) and set(i.devices) == set(BOTH)]
    parts = {(m.node, *m.inputs): m.time_s / program.edges[m.edge].time_s for m in moves}
    assert parts == {
        ("reward", "tokens", "mask"): 1.0,
        ("shaped", "logprobs"): pytest.approx(4 / 5),
        ("advantages", "mask"): 1.0,
    }


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8).map(tuple), max_size=7))
def test_classes_are_of_devices_in_the_same_groups(groups: list[tuple[int, ...]]) -> None:
    """Against the definition: two devices are in one class if and only if they are in the same groups."""
    different = list(dict.fromkeys(groups))
    of = {d: frozenset(n for n, g in enumerate(different) if d in g) for g in different for d in g}
    alike = [tuple(sorted(d for d in of if of[d] == numbers)) for numbers in set(of.values())]
    expected = {devices: of[devices[0]] for devices in sorted(alike)}
    assert list(device_classes(groups).items()) == list(expected.items())
