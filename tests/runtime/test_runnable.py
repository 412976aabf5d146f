"""Plans that compile but do not run are refused before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.plan.model_shape import SlidingWindow
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.rotary_scaling import LinearScaling, YarnScaling, default_attention_factor
from hflow.plan.strategy import Strategy
from hflow.plan.techniques import Speculation, Techniques
from hflow.plan.verify.runnable import check_runnable
from hflow.runtime.execute import execute
from tests.runtime.memory import with_strategy

FOLDER = Path(__file__).parent


def compiled(graph: Path, model: Path) -> Plan:
    return hflow.compile(hflow.load(graph, [f"params.model={model}"]), "clusters/local1.yaml")


@pytest.mark.parametrize(
    ("node", "strategy", "name"),
    [
        ("actor_train", Strategy(zero=3), "ZeRO-3"),
        ("ref_logprobs", Strategy(ep=2), "ep 2"),
        ("actor_train", Strategy(vpp=3), "vpp 3"),
    ],
)
def test_a_strategy_without_an_engine_is_refused(
    tiny_model: Path, tmp_path: Path, node: str, strategy: Strategy, name: str
) -> None:
    plan = with_strategy(compiled(FOLDER / "grpo_small.yaml", tiny_model), node, strategy)
    with pytest.raises(HflowError) as caught:
        execute(plan, tmp_path / "run", workers="inline")
    (found,) = caught.value.diagnostics
    assert found.code == "HF406" and found.span == plan.graph.node(node).span
    assert f"`{node}` is planned with {name}" in found.message and "ZeRO-1" in found.help
    assert not (tmp_path / "run").exists()


def test_a_plan_for_engines_that_there_are_not_is_refused_and_kept(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing but Python makes one; as a file it tells what it is."""
    graph = hflow.load(FOLDER / "grpo_small.yaml", [f"params.model={tiny_model}"])
    drafts = replace(load_cluster("local"), techniques=Techniques(speculation=Speculation(3, 2.0)))
    plan = hflow.compile(graph, drafts)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.hash != hflow.compile(graph, "local").hash
    with pytest.raises(HflowError, match="HF406.*engines with techniques that none has"):
        check_runnable(plan)


def test_rows_of_a_generate_node_are_whole(tiny_model: Path) -> None:
    """The planner never plans otherwise; a plan edited by hand may."""
    graph = hflow.load(FOLDER / "grpo_small.yaml", [f"params.model={tiny_model}"])
    plan = hflow.compile(graph, "clusters/local4.yaml", ["rollout=dp2@0-1", "actor_train=cp2@0-1"])
    mesh = plan.node("actor_train").mesh
    edited = tuple(replace(n, mesh=mesh) if n.node == "rollout" else n for n in plan.nodes)
    with pytest.raises(HflowError, match="HF406.*`rollout` is planned with cp 2"):
        check_runnable(replace(plan, nodes=edited))


def test_stages_are_interleaved_in_training_alone(tiny_model: Path) -> None:
    graph = hflow.load(FOLDER / "grpo_small.yaml", [f"params.model={tiny_model}"])
    plan = hflow.compile(graph, "clusters/local4.yaml", ["ref_logprobs=pp2@0-1", "actor_train=pp2,vpp2@0-1"])
    check_runnable(plan)
    strategy = Strategy(vpp=2)
    edited = tuple(replace(n, strategy=strategy) if n.node == "ref_logprobs" else n for n in plan.nodes)
    with pytest.raises(HflowError, match="HF406.*`ref_logprobs` is planned with vpp 2"):
        check_runnable(replace(plan, nodes=edited))


def test_nodes_that_share_an_optimizer_split_it_alike(tiny_model: Path, tmp_path: Path) -> None:
    plan = compiled(FOLDER / "graphs" / "trained_twice.yaml", tiny_model)
    first, second = (n.name for n in plan.graph.nodes if n.op == "train")
    with pytest.raises(HflowError, match=f"HF406(.|\n)*`{first}` and `{second}` share an optimizer"):
        execute(with_strategy(plan, second, Strategy(zero=1)), tmp_path / "run", workers="inline")


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"window": SlidingWindow(8, (1,))}, "a sliding window of 8 tokens"),
        ({"sinks": True}, "attention sinks"),
        ({"scaling": YarnScaling(4.0, 16, attention_factor=0.5)}, "an `attention_factor` of 0.5"),
        ({"scaling": YarnScaling(4.0, 16, attention_factor=default_attention_factor(4.0))}, ""),
        ({"scaling": LinearScaling(4.0)}, ""),
    ],
)
def test_what_sglang_would_leave_out_is_refused(
    tiny_model: Path, changes: dict[str, Any], lacking: str
) -> None:
    graph = hflow.load(FOLDER / "grpo_small.yaml", [f"params.model={tiny_model}"])
    plan = hflow.compile(graph, "clusters/local1.yaml", engines=["rollout=sglang"])
    plan = replace(plan, shapes={"actor": replace(plan.shapes["actor"], **changes)} | {
        name: shape for name, shape in plan.shapes.items() if name != "actor"
    })  # fmt: skip
    if not lacking:
        return check_runnable(plan)
    with pytest.raises(HflowError) as caught:
        check_runnable(plan)
    (found,) = caught.value.diagnostics
    assert found.code == "HF406" and found.help == "`--engine rollout=megatron`"
    assert found.message.endswith(f"SGLang, which does not apply what `actor` has: {lacking}")


def test_an_adapter_that_transformers_would_leave_out_is_refused(tiny_model: Path) -> None:
    graph = hflow.load(FOLDER / "grpo_small.yaml", [f"params.model={tiny_model}", "models.actor.adapter=4"])
    plan = hflow.compile(graph, "local1", engines=["rollout=transformers"])
    with pytest.raises(HflowError, match="HF406.*transformers, which does not apply .* an adapter"):
        check_runnable(plan)


def test_a_node_on_an_engine_that_does_not_run_its_kind_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """No compiler plans it; a file may say so."""
    plan = compiled(FOLDER / "grpo_small.yaml", tiny_model)
    nodes = tuple(replace(n, engine="sglang") if n.node == "actor_train" else n for n in plan.nodes)
    with pytest.raises(
        HflowError, match="HF406.*`actor_train` is planned on SGLang, which runs no train nodes"
    ):
        execute(replace(plan, nodes=nodes), tmp_path / "run", workers="inline")
