"""What offload and servers keep in the memory of hosts, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hflow
from hflow.cost.host_memory import host_memory
from hflow.cost.resident_memory import pinned_bytes
from hflow.diagnostics import HflowError
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.frozen import moved_parameters
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan
from tests.compiler.workloads import large

LLAMA_7B = NAMED_SHAPES["llama-7b"]
PARAMETERS_7B = 6_738_415_616
GB = 10**9
TRAINED = "actor_train=tp8,dp2,zero0,offload@0-15"


def with_hosts_of(gigabytes: float) -> Cluster:
    return replace(load_cluster("a100x16"), host_memory_bytes=round(gigabytes * GB))


def kept(plan: Plan) -> list[dict[str, int]]:
    found = host_memory(plan.graphs, plan.shapes, plan.cluster, plan.nodes)
    return [dict(parts) for _, parts in sorted(found.items())]


def test_pinned_blocks_are_powers_of_two() -> None:
    """Of Llama 2 7B in bf16: 4096 x 4096 is one; 4096 x 11008 is rounded up to 4096 x 16384, the embedding's
    4096 x 32000 to 4096 x 32768; the norms are too."""
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 16384) + 2 * 4096 * 32768
    norms = 65 * 4096
    assert pinned_bytes(LLAMA_7B, 2 * PARAMETERS_7B, 2, 1) == pytest.approx(2 * (matrices + norms))


def test_adams_state_waits_on_the_host_of_each_rank() -> None:
    """12 bytes for each parameter, tp8 on each of two hosts; beside it the reference."""
    graph = large("grpo", "llama-7b")
    plan = hflow.compile(graph, "a100x16", (TRAINED, "ref_logprobs=no-offload"))
    first, second = kept(plan)
    assert first == second and first.keys() == {"actor Adam", "actor snapshot"}
    assert 12 * PARAMETERS_7B < first["actor Adam"] < 1.5 * 12 * PARAMETERS_7B


def test_a_checkpoint_copies_each_element_once() -> None:
    """float32 weights and two moments of each parameter; the two hosts, replicas of one another, share them.
    Norms are on every rank of tp."""
    plan = hflow.compile(large("grpo", "llama-7b"), "a100x16", (TRAINED, "ref_logprobs=no-offload"))
    snapshots = [host["actor snapshot"] for host in kept(plan)]
    assert sum(snapshots) == pytest.approx(12 * PARAMETERS_7B, rel=1e-3)


def test_older_weights_are_copied_from_their_reader() -> None:
    pins = ("actor_train=tp8,no-offload@0-7", "rollout=tp4,dp2@8-15", "ref_logprobs=no-offload@0-7")
    plan = hflow.compile(large("async_grpo", "llama-7b"), "a100x16", pins)
    trains, reads = kept(plan)
    assert trains["actor snapshot"] == pytest.approx(12 * PARAMETERS_7B, rel=1e-3)
    assert reads == {"actor snapshot": pytest.approx(2 * PARAMETERS_7B, rel=1e-3)}


def test_a_server_with_older_weights_leaves_them_on_the_host() -> None:
    """It does not sleep, and is started again with a copy."""
    pins = ("actor_train=tp8,no-offload@0-7", "rollout=tp4,dp2@8-15", "ref_logprobs=no-offload@0-7")
    plan = hflow.compile(large("async_grpo", "llama-7b"), "a100x16", pins, engines=("rollout=sglang",))
    copies = kept(plan)[1]["actor weights for its server"]
    assert copies >= 2 * 2 * PARAMETERS_7B  # of each of two replicas


def test_a_sleeping_server_leaves_its_weights() -> None:
    graph = large("grpo", "llama-7b")
    pins = ("actor_train=tp8,no-offload@0-7", "rollout=tp2,dp4@0-7", "ref_logprobs=no-offload")
    plan = hflow.compile(graph, "a100x8", pins, engines=("rollout=sglang",))
    (host,) = kept(plan)
    assert host["actor weights for its server"] == pytest.approx(4 * 2 * PARAMETERS_7B, rel=1e-3)


def test_a_server_leaves_the_adapter_alone() -> None:
    graph = large("grpo", "llama-7b", "models.actor.adapter=16")
    pins = ("actor_train=tp8,no-offload@0-7", "rollout=tp2,dp4@0-7")
    plan = hflow.compile(graph, "a100x8", pins, engines=("rollout=sglang",))
    shape = plan.shapes["actor"]
    # of each of four replicas; what tp splits once, the rest on both ranks
    held = sum(p.size * (1 if p.shard is not None else 2) for p in moved_parameters(shape))
    assert kept(plan)[0]["actor weights for its server"] == 4 * 2 * held


def test_hosts_without_the_room_are_refused() -> None:
    graph = large("grpo", "llama-7b")
    with pytest.raises(HflowError, match="HF305") as caught:
        hflow.compile(graph, with_hosts_of(60), (TRAINED,))
    (told,) = caught.value.diagnostics
    assert told.message.startswith("host 0 keeps ") and "has 60 GB (`host_memory_gb`)" in told.message
    assert told.help.endswith("a pin asks for offload of `actor_train`")
    assert hflow.compile(graph, with_hosts_of(256), (TRAINED,)).node("actor_train").offload


def test_what_fits_no_host_is_not_offloaded() -> None:
    """PPO of 13B on 16 devices offloads where it may. Snapshots are left, for which there must be room."""
    graph = large("ppo", "llama-13b")
    free = hflow.compile(graph, "a100x16", budget_s=2.0)
    assert any(n.offload for n in free.nodes)
    with pytest.raises(HflowError, match="HF305") as caught:
        hflow.compile(graph, with_hosts_of(1), budget_s=2.0)
    (told,) = caught.value.diagnostics
    parts, helped = told.help.split(" GB; ")
    assert {part.rsplit(" ", 1)[0] for part in parts.split(" + ")} <= {"actor snapshot", "critic snapshot"}
    assert helped == "a snapshot is what a checkpoint is written from"


@pytest.mark.parametrize("said", ["host_memory_bytes", "server_bytes"])
def test_what_a_cluster_says_is_in_the_hash_of_its_plans(said: str) -> None:
    plan = hflow.compile(large("grpo", "llama-7b"), "h100x8")
    assert replace(plan, cluster=replace(plan.cluster, **{said: GB})).hash != plan.hash
    device = replace(plan.cluster.device, overhead_bytes=GB)
    assert replace(plan, cluster=replace(plan.cluster, device=device)).hash != plan.hash


def test_where_hosts_lack_the_room_less_waits_there() -> None:
    """A teacher of 1B on 3 devices of 40 GB: its weights stay on them, as `no-offload` would have it."""
    shapes = [f"params.{name}=shape:gemma-3-1b" for name in ("model", "teacher")]
    graph = hflow.load("algorithms/on_policy_distillation.yaml", [*shapes, "params.max_new_tokens=4096"])
    large = load_cluster("h100x8")
    device = replace(large.device, memory_bytes=40 * 10**9)
    small = replace(large, devices_per_host=3, device=device, host_memory_bytes=16 * 10**9)
    roomy = hflow.compile(graph, replace(small, host_memory_bytes=64 * 10**9))
    assert roomy.node("teacher_logprobs").offload
    plan, asked = (hflow.compile(graph, small, pins) for pins in ((), ("teacher_logprobs=no-offload",)))
    assert not plan.node("teacher_logprobs").offload and plan.step_time_s == asked.step_time_s
    models = [f"params.{name}=shape:qwen2.5-3b" for name in ("model", "reward_model")]
    with pytest.raises(HflowError, match="HF305") as caught:
        hflow.compile(hflow.load("algorithms/ppo.yaml", models), "h100x1")
    assert "nor does a plan fit without offload of `" in caught.value.diagnostics[0].help
