"""Context parallelism, chosen where rows are long, and sequence parallelism with tp; pinned, and refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from hflow.compiler.compile import compile_graph
from hflow.compiler.lowering import lower_weights
from hflow.compiler.regroup import generation_mesh
from hflow.cost.redistribution import weights_s
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from hflow.plan.layout import Mesh
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.sharding import Sharding
from hflow.view.terminal.terminal import plan_text
from tests.compiler.workloads import large

H100S = load_cluster("h100x8")
LONG = "params.max_new_tokens=31744"  # after prompts of 1,024


@cache
def grpo(*overrides: str, shape: str = "qwen3-8b") -> Graph:
    return large("grpo", shape, *overrides)


def planned(graph: Graph, *pins: str) -> Plan:
    return compile_graph(graph, H100S, pins)


def refusal(graph: Graph, *pins: str) -> str:
    with pytest.raises(HflowError) as caught:
        compile_graph(graph, H100S, pins)
    (found,) = caught.value.diagnostics
    assert found.code == "HF302"
    return f"{found.message}; {found.help}"


def test_rows_of_32k_tokens_are_cut() -> None:
    plan = planned(grpo(LONG))
    trained = plan.node("actor_train")
    assert trained.mesh.cp > 1, plan_text(plan)
    whole = planned(grpo(LONG), "actor_train=cp1,no-sp")
    assert plan.step_time_s < whole.step_time_s


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_short_rows_are_whole_unless_they_are_pinned(algorithm: str) -> None:
    graph = large(algorithm, "qwen3-8b")
    plan = planned(graph)
    assert all(n.mesh.cp == 1 for n in plan.nodes)
    pinned = planned(graph, "actor_train=cp2,tp2,sp", "ref_logprobs=cp8")
    train, ref = pinned.node("actor_train"), pinned.node("ref_logprobs")
    assert (train.mesh.cp, train.mesh.tp, train.strategy.sp, ref.mesh.cp) == (2, 2, True, 8)
    assert "cp2 tp2 sp" in plan_text(pinned)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_what_lies_between_products_is_split_where_that_is_faster(algorithm: str) -> None:
    """70B needs tp. With `sp` as many bytes are sent forward, and all else is less."""
    graph, cluster = large(algorithm, "llama-70b"), load_cluster("a100x64")
    free = compile_graph(graph, cluster)
    assert free.node("actor_train").strategy.sp
    whole = compile_graph(graph, cluster, ("actor_train=no-sp", "ref_logprobs=no-sp"))
    assert free.step_time_s < whole.step_time_s


def test_plans_of_whole_rows_say_nothing_of_it(tmp_path: Path) -> None:
    """So they, and their hashes, are those from before; and a plan with both is read again as it was."""
    whole, cut = (planned(grpo(), pin) for pin in ("actor_train=dp8", "actor_train=cp2,dp2,tp2,sp"))
    for plan, said in ((whole, False), (cut, True)):
        plan.save(tmp_path / "plan.json")
        text = (tmp_path / "plan.json").read_text()
        assert ('"cp"' in text, '"sp"' in text) == (said, said)
        assert load_plan(tmp_path / "plan.json") == plan
    changed = json.loads(text)
    for node in changed["nodes"]:
        if node["kind"] == "train":
            node["mesh"]["axes"] = [["pp", 1], ["dp", 2], ["cp", 4], ["tp", 1]]
    (tmp_path / "plan.json").write_text(json.dumps(changed))
    with pytest.raises(HflowError, match="HF306.*sequence parallelism over tp1"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("rollout=cp2", "generation reads whole rows: no cp2"),
        ("rollout=sp", "`sp` is for score and train nodes, and `rollout` is a generate node"),
        ("actor_train=tp1,sp", "sp has nothing to split over tp1"),
        ("actor_train=cp2,dp4,zero3", "zero3 splits over dp alone: no cp2"),
        ("actor_train=cp8,cp4", "`cp` is given twice"),
    ],
)
def test_what_cannot_be_cut_is_refused(pin: str, message: str) -> None:
    assert message in refusal(grpo(), pin)


def test_rows_of_models_with_experts_are_cut() -> None:
    """Of 8 rows in an update over 16 devices; and of rows that fit no other layout."""
    graph, cluster = grpo(LONG, "params.minibatch=8", shape="qwen3-30b-a3b"), load_cluster("h100x16")
    plan = compile_graph(graph, cluster, ())
    train, ref = plan.node("actor_train"), plan.node("ref_logprobs")
    assert train.mesh.cp > 1 or train.strategy.sp, plan_text(plan)
    assert train.strategy.ep > 1 and ref.mesh.cp > 1, plan_text(plan)
    whole = compile_graph(graph, cluster, ("actor_train=cp1,no-sp", "ref_logprobs=cp1,no-sp"))
    assert plan.step_time_s < whole.step_time_s
    longest = grpo("params.max_new_tokens=130000", shape="gpt-oss-20b")
    assert planned(longest).node("actor_train").strategy.sp
    assert "of 72.0 GB" in refusal(longest, "actor_train=cp1,no-sp")
    shorter = grpo(LONG, shape="gpt-oss-20b")
    together = planned(shorter, "actor_train=cp2,dp2,tp2,sp,ep2").node("actor_train")
    assert (together.mesh.cp, together.strategy.sp, together.strategy.ep) == (2, True, 2)


@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), [(1, 2, 2, 4), (2, 1, 4, 2), (1, 1, 16, 1)])
def test_weights_move_as_from_data_parallel_ranks(pp: int, dp: int, cp: int, tp: int) -> None:
    """Which have the same weights as those of cp; to generation regrouped from them nothing moves twice."""
    cluster = load_cluster("a100x16")
    shape = NAMED_SHAPES["llama-7b"]
    cut = Sharding(Mesh.of(cluster.devices, pp=pp, dp=dp, cp=cp, tp=tp))
    copied = Sharding(Mesh.of(cluster.devices, pp=pp, dp=dp * cp, tp=tp))
    regrouped = generation_mesh(cut.mesh, 1)
    assert regrouped == generation_mesh(copied.mesh, 1) and regrouped
    target = Sharding(regrouped)
    assert lower_weights(shape, "bf16", cut, target, cluster) == lower_weights(
        shape, "bf16", copied, target, cluster
    )
    assert weights_s(shape, "bf16", cut, target, cluster) == weights_s(shape, "bf16", copied, target, cluster)
    assert not weights_s(shape, "bf16", cut, copied, cluster)
