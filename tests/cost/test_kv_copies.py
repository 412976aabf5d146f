"""More ranks of tp than key-value heads: a rank does and holds as much as if every rank had its own head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.cost.activation_memory import kv_cache_bytes
from hflow.cost.comm import REACHED
from hflow.cost.compute import average_s, node_time_s, train_passes_s, update_s
from hflow.cost.execution import Execution
from hflow.cost.resident_memory import pinned_bytes, resident_bytes
from hflow.cost.working_memory import working_bytes
from hflow.graph.adapter import Adapter
from hflow.graph.ir import OpKind
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

TP8, TP8_DP2 = Mesh.of(tuple(range(8)), tp=8), Mesh.of(tuple(range(16)), dp=2, tp=8)
TP8_CP2 = Mesh.of(tuple(range(16)), cp=2, tp=8)
WORK = Workload(64, 512, 512, optimizer_steps=1, rows_per_update=64)
CLUSTER = load_cluster("h100x16")
FEW = ("qwen2.5-3b", "qwen3-30b-a3b", "gemma-2-2b")  # 2, 4 and 4 key-value heads


def of_own(shape: ModelShape) -> ModelShape:
    """Eight heads: of each rank one."""
    return replace(shape, num_kv_heads=8)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("mesh", [TP8, TP8_DP2, TP8_CP2], ids=["tp8", "dp2", "cp2"])
def test_passes_cost_what_they_do_with_a_head_for_each_rank(name: str, mesh: Mesh) -> None:
    few = NAMED_SHAPES[name]
    for strategy in (PLAIN, Strategy(recompute="full", sp=True)):
        found = [train_passes_s(Execution(s, "bf16", WORK, mesh, 4, CLUSTER, strategy)) for s in both(few)]
        assert found[0] == pytest.approx(found[1], rel=1e-12)
    ops: tuple[OpKind, ...] = ("generate", "score") if mesh.cp == 1 else ("score",)
    for op in ops:
        found = [node_time_s(op, s, "bf16", WORK, mesh, 4, CLUSTER) for s in both(few)]
        assert found[0] == pytest.approx(found[1], rel=1e-12)
        needed = [working_bytes(op, s, "bf16", WORK, mesh, 4) for s in both(few)]
        assert needed[0] == needed[1]
    needed = [working_bytes("train", s, "bf16", WORK, mesh, 4) for s in both(few)]
    assert needed[0] == needed[1]
    assert len({kv_cache_bytes(s, "bf16", 1000, mesh) for s in both(few)}) == 1


def both(few: ModelShape) -> tuple[ModelShape, ModelShape]:
    return few, of_own(few)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "adapter", [None, Adapter(8, 16.0, ("q_proj", "k_proj", "v_proj"))], ids=["", "adapter"]
)
def test_a_rank_holds_as_much_as_with_a_head_of_its_own(name: str, adapter: Adapter | None) -> None:
    few = replace(NAMED_SHAPES[name], adapter=adapter, moe=None)
    for trained, strategy in ((False, PLAIN), (True, PLAIN), (True, Strategy(zero=1))):
        found = [resident_bytes(s, "bf16", TP8_DP2, trained, strategy) for s in both(few)]
        assert found[0] == found[1]
    assert len({pinned_bytes(s, 10**9, 4, 8) for s in both(few)}) == 1
    assert average_s(few, TP8, CLUSTER) == pytest.approx(average_s(of_own(few), TP8, CLUSTER))


def test_an_update_sums_gradients_of_shared_heads() -> None:
    """By hand, of Qwen2.5-3B: four ranks share 36 layers x 2 x 128 rows x 2,048 columns and a bias, in
    float32; by ring, 3/4 of them twice."""
    few = NAMED_SHAPES["qwen2.5-3b"]
    for mesh in (TP8, TP8_DP2):
        more = update_s(few, "bf16", mesh, CLUSTER) - update_s(of_own(few), "bf16", mesh, CLUSTER)
        size, link = 36 * 2 * 128 * (2048 + 1) * 4, CLUSTER.intra_host
        ring = 2 * 3 / 4 * size / (link.bandwidth * REACHED["cuda"]) + 6 * link.latency_s
        assert more == pytest.approx(ring, rel=1e-6)
