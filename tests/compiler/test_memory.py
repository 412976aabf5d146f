"""Memory over time, against sums by hand: in f32 a weight takes 4 bytes, its gradient 4, Adam's state 8.

The devices are CPUs, where the snapshot of a checkpoint lies beside them: 12 bytes of a trained parameter,
4 of older weights, shared by replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest

import hflow
from hflow.compiler.memory import device_memory
from hflow.compiler.passes.check_memory import check_memory
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory
from hflow.plan.program import Program
from hflow.plan.strategy import Strategy
from tests.compiler.programs import instant, node_plans, scheduled
from tests.model_folder import CONFIG

DATA, TENSOR = Mesh.of((0, 1), dp=2), Mesh.of((0, 1), tp=2)
H, LAYERS, FFN, VOCAB = (
    CONFIG[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
)
NORMS = (2 * LAYERS + 1) * H
LAYER = 4 * H * H + 3 * H + 3 * H * FFN  # Q, K, V and their biases, output, gated MLP
ACTOR = VOCAB * H + LAYERS * LAYER + NORMS + VOCAB * H
CRITIC = VOCAB * H + LAYERS * LAYER + NORMS + H  # one row as head
HALF = (ACTOR - NORMS) // 2 + NORMS  # Q, K, V, MLP and embeddings are split over tp
MB = 10**6
NEEDS = {"rollout": 9 * MB, "ref_logprobs": 2 * MB, "actor_train": 7 * MB, "critic_train": 6 * MB}


def lagged(model: str, lag: int = 1) -> Graph:
    return hflow.load("tests/runtime/graphs/lagged.yaml", [f"params.model={model}", f"params.lag={lag}"])


def planned(
    graph: Graph,
    offload: Sequence[str] = (),
    meshes: Mapping[str, Mesh] = MappingProxyType({}),
    devices: int = 2,
) -> tuple[Draft, tuple[NodePlan, ...]]:
    """`meshes`: of the nodes that do not run on `DATA`."""
    lie = {n.name: meshes.get(n.name, DATA) for n in graph.nodes}
    nodes = node_plans(graph, lie, {}, NEEDS, offload)
    return scheduled(graph, instant(devices), nodes), nodes


def peak(graph: Graph, offload: Sequence[str] = (), **meshes: Mesh) -> DeviceMemory:
    draft, _ = planned(graph, offload, meshes)
    (memory,) = check_memory(draft).memory
    assert memory.peak_bytes == sum(memory.parts.values())
    return memory


def test_everything_stays(ppo: Graph) -> None:
    memory = peak(ppo)
    assert memory.node == "rollout" and memory.devices == (0, 1)
    assert memory.parts == {
        "actor weights, gradients, Adam, snapshot (dp2 @0-1)": 22 * ACTOR,
        "critic weights, gradients, Adam, snapshot (dp2 @0-1)": 22 * CRITIC,
        "ref weights (dp2 @0-1)": 4 * ACTOR,
        "reward weights (dp2 @0-1)": 4 * CRITIC,
        "rollout working set": 9 * MB,
    }


def test_zero_1_splits_the_optimizer(ppo: Graph) -> None:
    draft, nodes = planned(ppo)
    split = tuple(replace(n, strategy=Strategy(zero=1)) if n.node == "actor_train" else n for n in nodes)
    (memory,) = device_memory(draft, split)
    assert memory.parts["actor weights, gradients, Adam, snapshot (dp2 @0-1)"] == (4 + 4 + 8 // 2 + 6) * ACTOR


def test_offload_leaves_weights_of_trained_models_and_nothing_of_frozen_ones(ppo: Graph) -> None:
    """Most is needed while the actor trains: its state beside the critic's weights."""
    memory = peak(ppo, ("ref_logprobs", "reward", "actor_train", "critic_train"))
    assert memory.node == "actor_train"
    assert memory.parts == {
        "actor weights, gradients, Adam, snapshot (dp2 @0-1)": 22 * ACTOR,
        "critic weights, snapshot (dp2 @0-1)": 10 * CRITIC,
        "actor_train working set": 7 * MB,
    }


def test_what_is_onloaded_counts_while_its_node_runs(ppo: Graph) -> None:
    """With the reference alone offloaded, the rollout is still the fullest, now without the reference."""
    memory = peak(ppo, ("ref_logprobs",))
    assert memory.node == "rollout" and "ref weights (dp2 @0-1)" not in memory.parts
    assert memory.peak_bytes == 22 * ACTOR + 22 * CRITIC + 4 * CRITIC + 9 * MB


def test_a_copy_of_its_own_lies_there_only_for_its_reader(ppo: Graph) -> None:
    memory = peak(ppo, rollout=TENSOR)
    assert memory.node == "rollout"
    assert memory.parts["actor weights (tp2 @0-1)"] == 4 * HALF
    draft, nodes = planned(ppo, meshes={"rollout": TENSOR})
    (other,) = device_memory(
        draft, [replace(n, memory_bytes=99 * MB * (n.node == "actor_train")) for n in nodes]
    )
    assert other.node == "actor_train" and "actor weights (tp2 @0-1)" not in other.parts


def test_a_copy_that_waits_for_a_second_reader_counts_meanwhile(model: str) -> None:
    """ReMax draws two responses with one copy. If the reference ran between them, the copy would be there."""
    graph = hflow.load("algorithms/remax.yaml", [f"params.model={model}"])
    readers = [n.name for n in graph.nodes if n.op == "generate"]
    draft, nodes = planned(graph, meshes=dict.fromkeys(readers, TENSOR))
    assert draft.step
    nodes = tuple(replace(n, memory_bytes=50 * MB if n.node == "ref_logprobs" else 0) for n in nodes)
    (apart,) = device_memory(draft, nodes)  # without programs no copy waits
    (between,) = device_memory(draft, nodes, [_second_reader_last(draft.step, readers)])
    copy = "actor weights (tp2 @0-1)"
    assert apart.node == between.node == "ref_logprobs"
    assert copy not in apart.parts and between.parts[copy] == 4 * HALF


def _second_reader_last(step: Program, readers: list[str]) -> Program:
    """Only the calls of models, the reference before the second reader."""
    found = {(i.op, i.node): i for i in step.instructions}
    keys = ("call", readers[0]), ("call", "ref_logprobs"), ("call", readers[1])
    order = ("weights", readers[0]), *keys, ("release", readers[0])
    return replace(step, instructions=tuple(found[key] for key in order))


def test_older_weights_stay(model: str) -> None:
    with_copy, without = peak(lagged(model)), peak(lagged(model, 0))
    assert with_copy.parts["actor older weights, snapshot (dp2 @0-1)"] == 6 * ACTOR
    assert with_copy.peak_bytes - without.peak_bytes == 6 * ACTOR


def test_evaluation_needs_the_newest_weights_beside_the_older_ones(model: str) -> None:
    """A reader in another layout that is one update behind has both while it evaluates."""
    memory = peak(lagged(model), rollout=TENSOR)
    assert memory.parts == {
        "actor older weights, snapshot (tp2 @0-1)": 8 * HALF,
        "actor weights (tp2 @0-1)": 4 * HALF,
        "actor weights, gradients, Adam, snapshot (dp2 @0-1)": 22 * ACTOR,
        "rollout working set": 9 * MB,
    }


def test_classes_of_devices(ppo: Graph) -> None:
    """The critic on two other devices, the reference on one of these."""
    other, one = Mesh.of((2, 3), dp=2), Mesh.of((3,))
    meshes = {"critic_train": other, "values": other, "ref_logprobs": one}
    draft, _ = planned(ppo, meshes=meshes, devices=4)
    memory = {m.devices: m for m in check_memory(draft).memory}
    assert {devices: m.node for devices, m in memory.items()} == {
        (0, 1): "rollout", (2,): "critic_train", (3,): "critic_train",
    }  # fmt: skip
    assert memory[0, 1].peak_bytes == 22 * ACTOR + 4 * CRITIC + 9 * MB
    assert memory[2,].peak_bytes == 22 * CRITIC + 6 * MB
    assert memory[3,].peak_bytes == 22 * CRITIC + 4 * ACTOR + 6 * MB


def test_too_much_is_refused_with_its_node_and_its_parts(ppo: Graph) -> None:
    draft, _ = planned(ppo, ("ref_logprobs", "reward", "actor_train", "critic_train"))
    needed = 22 * ACTOR + 10 * CRITIC + 7 * MB
    exact, short = (
        replace(
            draft, cluster=replace(draft.cluster, device=replace(draft.cluster.device, memory_bytes=size))
        )
        for size in (needed, needed - 1)
    )
    assert check_memory(exact).memory[0].peak_bytes == needed
    with pytest.raises(HflowError) as caught:
        check_memory(short)
    (found,) = caught.value.diagnostics
    assert found.code == "HF305" and "device 0-1" in found.message and "`actor_train` runs" in found.message
    assert "actor weights, gradients, Adam, snapshot (dp2 @0-1)" in found.help
