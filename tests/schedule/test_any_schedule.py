"""What holds of every schedule, whatever was planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import hflow
from hflow.compiler.state import Draft
from hflow.graph.ir import Graph
from hflow.plan.digests import digests_of
from hflow.plan.layout import Mesh
from hflow.plan.plan import VERSION, Plan
from hflow.plan.program import Program, Timed
from hflow.plan.verify.consistency import inconsistencies
from hflow.schedule.timed_span import spans, step_time_s
from tests.compiler.programs import instant, node_plans, scheduled
from tests.schedule.test_schedule import BOTH, MESH_A, MESH_B, PPO_S, step_of


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    placed=st.lists(st.sampled_from([MESH_A, MESH_B, Mesh.of(BOTH, dp=2, tp=2)]), min_size=5, max_size=5),
    times=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    offload=st.sets(st.sampled_from(["ref_logprobs", "reward", "critic_train"])),
)
def test_whatever_is_planned(placed: Sequence[Mesh], times: Sequence[int], offload: set[str]) -> None:
    """No device does two things at once, everything waits for what it needs, and nothing is out of order."""
    graph = _ppo()
    roles = {"actor_train": 0, "rollout": 1, "ref_logprobs": 2, "reward": 3, "values": 4, "critic_train": 4}
    meshes = {n.name: placed[roles.get(n.name, 1)] for n in graph.nodes}
    nodes = node_plans(graph, meshes, dict(zip(PPO_S, map(float, times))), offload=offload)
    draft = scheduled(graph, instant(4), nodes)
    assert draft == scheduled(graph, instant(4), nodes)
    for program in (p for p in (draft.step, draft.evaluation) if p):
        _check(program)
    assert list(inconsistencies(_plan(draft))) == []
    busiest = max(_busy_s(step_of(draft)).values())
    assert busiest - 1e-9 <= draft.step_time_s <= sum(i.time_s for i in _timed(step_of(draft))) + 1e-9


def _ppo() -> Graph:
    """Named shapes need no files, so that hypothesis can load it in each example."""
    shape = "shape:qwen2.5-0.5b"
    return hflow.load("algorithms/ppo.yaml", [f"params.model={shape}", f"params.reward_model={shape}"])


def _plan(draft: Draft) -> Plan:
    return Plan(
        VERSION, draft.cluster, draft.shapes, draft.nodes, step_of(draft), draft.evaluation, (),
        draft.step_time_s, 1, draft.search, digests_of(draft.graph),
    )  # fmt: skip


def _check(program: Program) -> None:
    told = spans(program, 3)
    ends = {(s.step, s.path[0]): s.end_s for s in told}
    on_device: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in told:
        for before in span.instruction.after:
            assert ends.get((span.step, before), 0.0) <= span.start_s + 1e-9
        for device in span.instruction.devices:
            on_device[device].append((span.start_s, span.end_s))
    for own in on_device.values():
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(own))
    for number, instruction in enumerate(program.instructions):
        assert all(before < number for before in instruction.after)


def _timed(program: Program) -> list[Timed]:
    return [i for i in program.instructions if isinstance(i, Timed)]


def _busy_s(program: Program) -> dict[int, float]:
    busy: dict[int, float] = defaultdict(float)
    for instruction in _timed(program):
        for device in instruction.devices:
            busy[device] += instruction.time_s
    return busy


@pytest.mark.parametrize("graph", ["lagged", "region", "trained_twice"])
def test_a_program_read_from_a_file_has_the_same_spans(model: str, graph: str) -> None:
    """Spans need nothing but the program, so that a plan read from a file tells the same times."""
    loaded = hflow.load(f"tests/runtime/graphs/{graph}.yaml", [f"params.model={model}"])
    meshes = dict.fromkeys((n.name for n in loaded.nodes), MESH_A)
    program = step_of(scheduled(loaded, instant(2), node_plans(loaded, meshes, {"rollout": 2.0})))
    again = TypeAdapter(Program).validate_json(TypeAdapter(Program).dump_json(program))
    assert spans(again, 2) == spans(program, 2) and step_time_s(again) == step_time_s(program)


def test_an_order_edited_by_hand_is_checked() -> None:
    graph = _ppo()
    meshes = dict.fromkeys((n.name for n in graph.nodes), MESH_A)
    plan = _plan(scheduled(graph, instant(2), node_plans(graph, meshes, {})))
    first = replace(plan.step.instructions[0], after=(3,))
    step = replace(plan.step, instructions=(first, *plan.step.instructions[1:]))
    assert list(inconsistencies(replace(plan, step=step))) == [
        "instruction 0 waits for 3, which is not before it"
    ]


def test_nodes_that_share_weights_offload_together(model: str) -> None:
    """The optimizer of two trainings cannot be away for one of them only."""
    graph = hflow.load("tests/runtime/graphs/trained_twice.yaml", [f"params.model={model}"])
    meshes = dict.fromkeys((n.name for n in graph.nodes), MESH_A)
    one, both = (
        _plan(scheduled(graph, instant(2), node_plans(graph, meshes, {}, offload=names)))
        for names in (("first",), ("first", "again"))
    )
    assert list(inconsistencies(both)) == []
    (problem,) = inconsistencies(one)
    assert "`first`" in problem and "`again`" in problem and "only one of them offloads" in problem
