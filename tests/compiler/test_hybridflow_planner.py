"""HybridFlow's planner against its paper (arXiv:2409.19256): counts, prices, what its plans may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from hflow.compiler.compile import compile_graph, new_draft
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.place import place
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.placements import Partition, partitions
from hflow.compiler.planner.published.hybridflow import enum_alloc, hybridflow
from hflow.compiler.planner.published.mapper import Mapper
from hflow.compiler.planner.published.placed_candidates import candidates_with
from hflow.compiler.planner.published.stages import in_turn, stage_sum_s
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.strategy import PLAIN, Strategy
from tests.compiler.workloads import ROOT, large

HYBRIDFLOW = PlannerOptions(planner="hybridflow")


def a100(gpus: int) -> Cluster:
    return load_cluster(ROOT / f"clusters/a100x{gpus}.yaml")


def drafted(algorithm: str, shape: str, cluster: Cluster, options: PlannerOptions = HYBRIDFLOW) -> Draft:
    return candidates(weight_edges(new_draft(large(algorithm, shape), cluster, (), options)))


def space_of(algorithm: str, shape: str, cluster: Cluster) -> SearchSpace:
    draft = drafted(algorithm, shape, cluster)
    return SearchSpace(draft)


def mapper_of(space: SearchSpace) -> Mapper:
    return Mapper(space, candidates_with(space.draft, [u for u in space.groups if u.role == "generate"]))


def compiled(algorithm: str, shape: str, gpus: int) -> Plan:
    return compile_graph(large(algorithm, shape), a100(gpus), options=HYBRIDFLOW)


@pytest.mark.parametrize(("models", "bell"), [(3, 5), (4, 15), (5, 52)])
def test_placements_are_bell_numbers(models: int, bell: int) -> None:
    """Section 6: 15 for PPO's four models; ReMax has three, Safe-RLHF five."""
    names = tuple("abcde"[:models])
    found = {frozenset(map(frozenset, p)) for p in partitions(large("ppo", "llama-7b"), names, "auto")}
    assert len(found) == bell
    assert all(sorted(m for members in p for m in members) == list(names) for p in found)


@pytest.mark.parametrize(("total", "count"), [(128, 382_271), (16, 1191)])
def test_allocations_of_four_models(total: int, count: int) -> None:
    """128 GPUs one by one, or as 16 hosts: 1 + 7 (N-1) + 6 C(N-1, 2) + C(N-1, 3), as four things have 1, 7, 6
    and 1 partitions into 1 to 4 sets."""
    found = {k: sum(1 for _ in enum_alloc([range(1, total + 1)] * k, total)) for k in range(1, 5)}
    assert found[1] + 7 * found[2] + 6 * found[3] + found[4] == count


def test_all_devices_are_given_out_and_no_set_gets_less_than_its_least() -> None:
    assert list(enum_alloc([[2, 4], [1, 4], [2]], 8)) == [(2, 1, 5), (2, 4, 2), (4, 1, 3)]


def published_cost(plm: Sequence[Sequence[Sequence[float]]]) -> float:
    """d_cost of Algorithm 1, line by line."""
    c = [0.0] * 3
    for colocated in plm:
        c_g = [0.0] * 3
        for i in range(3):
            for simulated in colocated:
                c_g[i] += simulated[i]
            c[i] = max(c[i], c_g[i])
    return sum(c)


def test_cost_is_the_published_one() -> None:
    actor, critic, ref, reward = (50.0, 0.0, 30.0), (0.0, 8.0, 29.0), (0.0, 9.0, 0.0), (0.0, 7.0, 0.0)
    together, apart = [[actor, critic, ref, reward]], [[actor], [critic, ref], [reward]]
    for plm in (together, apart, [[actor, ref], [critic, reward]]):
        assert stage_sum_s(in_turn(each) for each in plm) == published_cost(plm)
    assert stage_sum_s([in_turn([actor, ref]), in_turn([critic, reward])]) == 50 + 15 + 30


@pytest.mark.parametrize("algorithm", ["ppo", "remax"])
def test_no_allocation_of_single_devices_is_cheaper(algorithm: str) -> None:
    """Sizes are skipped on which nothing changes. Of all compositions of 16 devices none gives less."""
    space = space_of(algorithm, "llama-7b", a100(16))
    mapper = mapper_of(space)

    def cost(partition: Partition, counts: tuple[int, ...]) -> float:
        mapped = [found for each in zip(partition, counts) if (found := mapper.on(*each))]
        return published_cost([[m.times] for m in mapped]) if len(mapped) == len(partition) else float("inf")

    for partition in space.partitions():
        few = [cost(partition, c) for c in enum_alloc(list(map(mapper.sizes, partition)), 16)]
        every = [c for c in product(range(1, 17), repeat=len(partition)) if sum(c) == 16]
        assert min(few) == min(cost(partition, c) for c in every) < float("inf")


def as_verl_sets_it_up(node: NodePlan) -> Strategy:
    """Its optimizer is split over replicas, and rows over tp, but where it generates."""
    splits = node.kind == "train" and node.mesh.dp > 1
    return replace(PLAIN, zero=1 if splits else 0, sp=node.kind != "generate" and node.mesh.tp > 1)


@pytest.mark.parametrize("gpus", [16, 64])
def test_models_have_one_layout_and_nothing_but_megatron(gpus: int) -> None:
    plan = compiled("ppo", "llama-7b", gpus)
    trainer, rollout = plan.node("actor_train").mesh, plan.node("rollout").mesh
    assert plan.node("values").mesh == plan.node("critic_train").mesh
    assert set(rollout.devices) == set(trainer.devices)
    assert rollout.pp == 1 and trainer.tp % rollout.tp == 0
    for node in (n for n in plan.nodes if n.model):
        assert not node.offload and replace(node.strategy, recompute="none") == as_verl_sets_it_up(node)
        assert node.mesh.pp <= max(1, len(node.mesh.devices) // 8) and node.mesh.tp <= 8


def test_least_allocation_holds_the_state() -> None:
    """18 bytes per trained parameter and 2 per frozen one. PPO's four Llama-7B (6.74e9 parameters, two of
    them without the head of 32,000 x 4,096) keep 267 GB: with 72 GB each, 4 devices. Actor and critic of 13B
    (13.0e9) keep 468 GB: 7 devices, so 8."""
    mapper = mapper_of(space_of("ppo", "llama-7b", a100(8)))
    least = mapper.least(("actor", "critic", "ref", "reward"))
    assert least and least.count == 4 and least.sizes["actor"] == (1, 4)
    kept = 40 * 6.74e9 - 20 * 32_000 * 4096
    assert least.free_bytes == pytest.approx(72e9 - kept / 4, rel=0.01)
    larger = mapper_of(space_of("ppo", "llama-13b", a100(16))).least(("actor", "critic"))
    assert larger and larger.count == 8


@pytest.mark.parametrize(
    ("shape", "gpus"), [("llama-7b", 8), ("llama-13b", 16), ("llama-34b", 32), ("llama-70b", 64)]
)
def test_ppo_runs_on_the_papers_smallest_clusters(shape: str, gpus: int) -> None:
    plan = compiled("ppo", shape, gpus)
    assert all(m.peak_bytes <= m.capacity_bytes for m in plan.memory)
    assert plan.search.gap is None and plan.search.planner == "hybridflow"


@pytest.mark.parametrize(
    ("algorithm", "shape", "gpus"),
    [("ppo", "llama-34b", 64), ("remax", "llama-13b", 16), ("grpo", "llama-34b", 32)],
)
def test_exact_is_never_slower(algorithm: str, shape: str, gpus: int) -> None:
    exact = compile_graph(large(algorithm, shape), a100(gpus), options=PlannerOptions(budget_s=5))
    assert exact.step_time_s <= compiled(algorithm, shape, gpus).step_time_s


@pytest.mark.parametrize("algorithm", ["ppo", "remax", "async_grpo", "dapo", "iterative_grpo", "dpo"])
def test_the_schedule_takes_as_long_as_the_planner_said(algorithm: str) -> None:
    space = space_of(algorithm, "llama-7b", a100(16))
    found = hybridflow(space)
    assert found.choice
    assert compiled(algorithm, "llama-7b", 16).step_time_s == pytest.approx(found.choice.step_s, rel=1e-6)


def test_a_placement_restricts_the_partitions() -> None:
    options = PlannerOptions("colocate", "hybridflow")
    placed = place(drafted("ppo", "llama-7b", a100(16), options))
    assert {n.mesh.devices for n in placed.nodes if n.kind == "train"} == {tuple(range(16))}


def refused(algorithm: str, shape: str, gpus: int, pins: Sequence[str] = ()) -> tuple[str, str]:
    with pytest.raises(HflowError) as caught:
        compile_graph(large(algorithm, shape), a100(gpus), pins, HYBRIDFLOW)
    (problem,) = caught.value.diagnostics
    return problem.code, problem.message


def test_pins_are_refused() -> None:
    assert refused("ppo", "llama-7b", 8, ["rollout=tp2"]) == (
        "HF309",
        "planner `hybridflow` cannot keep --pin rollout=tp2",
    )


def test_too_small_a_cluster_is_refused() -> None:
    """It knows no offload: 34B PPO, whose state alone is 1.3 TB on 1.15, is not for it."""
    code, message = refused("ppo", "llama-34b", 16)
    assert code == "HF305" and message == "no plan of the planner `hybridflow` fits on `a100x16`"
