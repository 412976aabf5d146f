"""The plans of DeepSpeed-Chat, OpenRLHF and NeMo-Aligner: that they are what the papers say, and cost it."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from hflow.compiler.compile import compile_graph
from hflow.compiler.options import PlacementPolicy, Planner, PlannerOptions
from hflow.cost.compute import node_time_s
from hflow.cost.working_memory import working_bytes
from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.verify.runnable import check_runnable
from hflow.plan.workload import workload
from hflow.view.terminal.terminal import search_text
from tests.compiler.workloads import ROOT, large

BASELINES: tuple[Planner, ...] = ("deepspeed-chat", "openrlhf", "nemo-aligner")
LLAMA_7B = 6.74e9


@cache
def compiled(planner: Planner, algorithm: str = "ppo", shape: str = "llama-7b", gpus: int = 16) -> Plan:
    cluster = load_cluster(ROOT / f"clusters/a100x{gpus}.yaml")
    return compile_graph(large(algorithm, shape), cluster, options=PlannerOptions(planner=planner))


def of_models(plan: Plan) -> list[NodePlan]:
    return [n for n in plan.nodes if n.model]


def test_deepspeed_chat_splits_everything_over_all_devices() -> None:
    plan = compiled("deepspeed-chat")
    rollout = plan.node("rollout")
    assert {n.mesh.devices for n in of_models(plan)} == {tuple(range(16))}
    assert {(n.mesh.dp, n.strategy.zero) for n in of_models(plan) if n != rollout} == {(16, 3)}
    assert rollout.strategy.zero == 0 and rollout.mesh.tp in (1, 2, 4, 8)
    (memory,) = plan.memory
    parts = {name: size for name, size in memory.parts.items() if "Adam" in name and name.startswith("actor")}
    assert sum(parts.values()) == pytest.approx(18 * LLAMA_7B / 16, rel=0.01)


def test_deepspeed_chat_generates_with_the_best_tensor_parallelism() -> None:
    """Pinned to each size on the same devices, generation alone takes no less."""
    plan = compiled("deepspeed-chat")
    chosen = plan.node("rollout")
    cluster, graph = plan.cluster, plan.graph
    for tp in (1, 2, 4, 8):
        node = graph.node("rollout")
        mesh, wave = Mesh.of(tuple(range(16)), dp=16 // tp, tp=tp), chosen.micro_batch
        seconds = node_time_s("generate", plan.shapes["actor"], "bf16", workload(node), mesh, wave, cluster)
        needed = working_bytes("generate", plan.shapes["actor"], "bf16", workload(node), mesh, wave)
        held = 40 * LLAMA_7B / 16 + 2 * LLAMA_7B / tp
        assert seconds >= chosen.time_s or needed + held > cluster.device.usable_bytes


def test_openrlhf_puts_each_model_and_generation_apart() -> None:
    plan = compiled("openrlhf")
    assert plan.node("values").mesh == plan.node("critic_train").mesh
    groups = ("rollout", "reward", "ref_logprobs", "actor_train", "critic_train")
    devices = [set(plan.node(name).mesh.devices) for name in groups]
    assert all(one.isdisjoint(other) for one, other in combinations(devices, 2))
    assert all(len(each).bit_count() == 1 for each in devices) and sum(map(len, devices)) <= 16
    for node in (n for n in of_models(plan) if n.node != "rollout"):
        assert (node.mesh.pp, node.mesh.tp, node.strategy.zero) == (1, 1, 3)


def test_openrlhf_moves_the_weights_to_the_generation_devices() -> None:
    """Generation has no device in common with training: each of its devices receives its whole shard."""
    plan = compiled("openrlhf")
    (edge,) = [e for e in plan.step.edges if e.name == "actor => rollout"]
    assert edge.bytes_per_device == pytest.approx(2 * LLAMA_7B / plan.node("rollout").mesh.tp, rel=0.01)
    assert edge.bytes_per_device == edge.lower_bound_bytes_per_device


def test_nemo_aligner_has_two_halves_and_no_cache() -> None:
    plan = compiled("nemo-aligner")
    left, right = set(range(8)), set(range(8, 16))
    for node in of_models(plan):
        assert set(node.mesh.devices) <= (left if node.model in ("actor", "ref") else right)
        assert node.strategy.zero == (node.kind == "train" and node.mesh.dp > 1) and not node.offload
        assert node.strategy.kv_cache == (node.node != "rollout")
    assert plan.node("rollout").mesh.tp == plan.node("actor_train").mesh.tp


def test_no_engine_runs_a_plan_without_a_cache() -> None:
    with pytest.raises(HflowError) as caught:
        check_runnable(compiled("nemo-aligner"))
    problems = [d.message for d in caught.value.diagnostics if "KV cache" in d.message]
    assert problems == [
        "`rollout` is planned with generation without a KV cache, which no engine runs yet: compile only"
    ]


def test_generation_without_a_cache_takes_what_its_products_take() -> None:
    """1,024 rows, 1,024 new tokens, 1,536 tokens before each on average, 2 FLOP per weight, on 8 A100s at the
    cluster file's 60 % of 312 TFLOP/s; beside it attention, norms and all-reduces: less than half more."""
    products_s = 1024 * 1024 * 1536 * 2 * 6.6e9 / (8 * 0.6 * 312e12)
    taken = compiled("nemo-aligner").node("rollout").time_s
    assert products_s < taken < 1.5 * products_s


@pytest.mark.parametrize("planner", BASELINES)
def test_twice_the_devices_are_faster(planner: Planner) -> None:
    slower, faster = compiled(planner), compiled(planner, gpus=32)
    assert slower.step_time_s / 2.6 < faster.step_time_s < slower.step_time_s


@pytest.mark.parametrize("planner", BASELINES)
def test_exact_is_never_slower(planner: Planner) -> None:
    """hflow's space holds no ZeRO-3, and still has no slower plan."""
    exact = compiled("exact", "ppo", "llama-34b", 64).step_time_s
    assert exact < compiled(planner, "ppo", "llama-34b", 64).step_time_s


@pytest.mark.parametrize("planner", BASELINES)
def test_plans_say_that_they_are_not_proven(planner: Planner) -> None:
    plan = compiled(planner)
    assert plan.search.gap is None and plan.search.planner == planner
    assert search_text(plan.search).startswith(f"{planner}: ")
    assert search_text(plan.search).endswith("not proven best")


@pytest.mark.parametrize("algorithm", ["async_grpo", "dapo", "dpo", "iterative_grpo", "safe_rlhf"])
@pytest.mark.parametrize("planner", ["deepspeed-chat", "openrlhf"])
def test_any_algorithm_has_a_plan_that_fits(planner: Planner, algorithm: str) -> None:
    plan = compiled(planner, algorithm)
    assert all(m.peak_bytes <= m.capacity_bytes for m in plan.memory)


def refused(
    planner: Planner, algorithm: str, gpus: int, *pins: str, placement: PlacementPolicy = "auto"
) -> str:
    cluster = load_cluster(ROOT / f"clusters/a100x{gpus}.yaml")
    with pytest.raises(HflowError) as caught:
        compile_graph(large(algorithm, "llama-34b"), cluster, pins, PlannerOptions(placement, planner))
    (problem,) = caught.value.diagnostics
    return f"{problem.code}: {problem.message}"


@pytest.mark.parametrize("planner", BASELINES)
def test_wishes_are_refused(planner: Planner) -> None:
    found = refused(planner, "ppo", 32, "rollout=tp8", placement="split")
    assert found == f"HF309: planner `{planner}` cannot keep --pin rollout=tp8 --placement split"


def test_nemo_aligner_needs_both_heads() -> None:
    assert refused("nemo-aligner", "grpo", 32).startswith(
        "HF309: planner `nemo-aligner` puts models with an lm"
    )


def test_what_does_not_fit_is_refused() -> None:
    """Actor and critic of 34B take 18 x 33.7e9 bytes each, more than half of the 16 devices' memory."""
    assert refused("openrlhf", "ppo", 16) == "HF305: no plan of the planner `openrlhf` fits on `a100x16`"
