"""Kept sets are moved like other values, and what they take is counted."""

from __future__ import annotations

import hflow
from hflow.compiler.lowering import row_bytes
from hflow.cost.activation_memory import head_bytes
from hflow.graph.load import load
from hflow.plan.edges import DataEdge
from hflow.plan.layout import Mesh
from hflow.plan.workload import workload

KEPT = [
    "nodes.rollout.with.top_p=0.9", "nodes.rollout.with.max_kept=40",
    "nodes.actor_train.in.kept=rollout.kept", "nodes.ref_logprobs.in.kept=rollout.kept",
]  # fmt: skip
TINY = ["params.model=shape:llama-7b"]


def test_a_plan_moves_and_prices_the_sets() -> None:
    plain, truncated = (
        hflow.compile(
            load("algorithms/grpo.yaml", [*TINY, *more]), "clusters/a100x8.yaml", placement="standalone"
        )
        for more in ([], KEPT)
    )
    rollout = truncated.graph.node("rollout")
    resp = rollout.type_of("mask").dims[-1].size
    assert resp
    # int32: a size for every token, and its ids
    assert row_bytes(rollout.type_of("kept")) == 4 * resp * (1 + 40)
    moved = [e for e in truncated.step.edges if isinstance(e, DataEdge) and "kept" in e.ports]
    assert moved and all(e.size_bytes >= rollout.rows * 4 * resp * 41 for e in moved)
    assert not any(isinstance(e, DataEdge) and "kept" in e.ports for e in plain.step.edges)


def test_log_probs_over_sets_take_memory() -> None:
    graph = load("algorithms/grpo.yaml", [*TINY, *KEPT])
    plan = hflow.compile(load("algorithms/grpo.yaml", TINY), "clusters/a100x8.yaml")
    shape = plan.shapes["actor"]
    for name in ("ref_logprobs", "actor_train"):
        node = graph.node(name)
        work, mesh = workload(node), Mesh.of((0,))
        assert work.kept == 40
        without = workload(load("algorithms/grpo.yaml", TINY).node(name))
        sizes = [head_bytes(node.op, shape, "f32", each, mesh, 8) for each in (work, without)]
        more = sizes[0] - sizes[1]
        assert more == 8 * work.response * 40 * 24
