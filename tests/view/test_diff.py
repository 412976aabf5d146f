from __future__ import annotations

from dataclasses import replace

from hflow import units
from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan
from hflow.plan.strategy import Strategy
from hflow.view.terminal.diff import plan_diff
from tests.view.examples import ALL, PLAN, TRAIN


def with_node(name: str, **changes: object) -> Plan:
    nodes = tuple(replace(n, **changes) if n.node == name else n for n in PLAN.nodes)  # type: ignore[arg-type]
    return replace(PLAN, nodes=nodes)


def test_equal_plans_differ_in_nothing() -> None:
    assert plan_diff(PLAN, PLAN) == (("changed", "nothing: the same layouts on the same devices"),)


def test_a_node_tells_all_that_is_new() -> None:
    mesh = Mesh.of(tuple(range(8)), dp=2, tp=4)
    new = with_node(
        "actor_train", mesh=mesh, micro_batch=4, strategy=Strategy("full", 1), offload=True, time_s=6.0
    )
    assert plan_diff(PLAN, new) == (
        (
            "changed",
            "actor_train  dp2 tp2 -> dp2 tp4 zero1 recompute offload, @0-3 -> @0-7, micro-batch 8 -> 4"
            " (9.7 s -> 6.0 s)",
        ),
    )


def test_the_order_of_devices_counts() -> None:
    regrouped = replace(ALL, devices=(0, 2, 1, 3, 4, 6, 5, 7))
    ((_, text),) = plan_diff(PLAN, with_node("rollout", mesh=regrouped))
    assert text == "rollout  devices in another order (14.0 s -> 14.0 s)"


def test_steps_clusters_and_nodes_that_come_and_go() -> None:
    renamed = tuple(replace(n, node="judge") if n.node == "reward" else n for n in PLAN.nodes)
    cluster = replace(PLAN.cluster, name="h200x8")
    new = replace(PLAN, nodes=renamed, cluster=cluster, step_time_s=PLAN.step_time_s / 2)
    assert [text for _, text in plan_diff(PLAN, new)] == [
        "step  27.5 s -> 13.8 s (-50.0%)",
        "cluster  h100x8 -> h200x8",
        "judge  new: dp8 @0-7",
        "reward  gone",
    ]
    assert [text for _, text in plan_diff(new, PLAN)][:2] == [
        "step  13.8 s -> 27.5 s (+100.0%)",
        "cluster  h200x8 -> h100x8",
    ]


def test_other_work_is_told() -> None:
    """Otherwise a step that is twice as long would seem to be due to the layouts."""
    actor, *others = PLAN.graph.models
    graph = replace(PLAN.graph, name="dapo", models=(replace(actor, dtype="bf16"), *others))
    shapes = {**PLAN.shapes, "ref": replace(PLAN.shapes["ref"], num_layers=80)}
    step = replace(PLAN.step, graph=graph)
    new = replace(PLAN, step=step, shapes=shapes, tokens_per_step=2 * PLAN.tokens_per_step)
    tokens = (units.count(plan.tokens_per_step) for plan in (PLAN, new))
    assert [text for _, text in plan_diff(PLAN, new)] == [
        "graph  grpo -> dapo",
        "models  actor f32 -> bf16, ref of another shape",
        f"tokens per step  {' -> '.join(tokens)}",
    ]


def test_nodes_without_a_model_follow_their_values() -> None:
    assert plan_diff(PLAN, with_node("reward", mesh=TRAIN, micro_batch=1)) == plan_diff(PLAN, PLAN)
