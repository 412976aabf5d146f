"""Plans in which readers get the weights alone that have changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.builder.python_printer import to_python
from hflow.graph.ir import Graph
from hflow.graph.load import assembled, read_graph
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.cluster import Cluster, Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.edges import WeightEdge
from hflow.plan.frozen import trained_with
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.view.terminal.plan_json import plan_json
from hflow.view.terminal.stages import edge_rows

SLOW = replace(load_cluster("h100x16"), inter_host=Link(1.25e9, 1e-5), nics_per_host=1)  # 10 Gb/s
LAYOUT = "tp4,dp2@0-7"
APART = tuple(f"{node}={LAYOUT}" for node in ("actor_train", "ref_logprobs", "actor_logprobs"))
APART += ("rollout=tp4,dp2@8-15",)


def graph_of(share: float | None, *more: str) -> Graph:
    said = ["params.model=shape:qwen2.5-7b", "models.actor.dtype=bf16", "models.ref.dtype=bf16"]
    said += ["params.max_new_tokens=512", "params.batch=32"]
    said += ["params.minibatch=128", *more]
    said += [f"nodes.rollout.model.delta_weights={share}"] if share else []
    return hflow.load("async_grpo", said)


def edge_of(plan: Plan) -> WeightEdge:
    (edge,) = (e for e in plan.step.edges if isinstance(e, WeightEdge) and e.target == "rollout")
    return edge


def compiled(share: float | None, cluster: Cluster, pins: tuple[str, ...] = APART) -> Plan:
    return hflow.compile(graph_of(share), cluster, pins)


def test_over_a_slow_link_they_take_less_time_and_more_memory() -> None:
    whole, changed = compiled(None, SLOW), compiled(0.02, SLOW)
    assert edge_of(whole).changed is None and edge_of(changed).changed == 0.02
    assert edge_of(changed).time_s < 0.2 * edge_of(whole).time_s
    assert changed.step_time_s < whole.step_time_s
    assert edge_of(changed).copies == edge_of(whole).copies, "where that is longer, all travel"
    assert [trained_with(plan.graph, "actor").sent for plan in (whole, changed)] == [0, 1]


def test_over_a_fast_link_all_are_sent() -> None:
    fast = replace(SLOW, inter_host=Link(4e12, 1e-5))
    assert edge_of(compiled(0.02, fast)).changed is None


def test_it_is_told_and_kept_in_a_file(tmp_path: Path) -> None:
    plan = compiled(0.02, SLOW)
    rows = edge_rows(plan.graph, plan.step.edges)
    assert [values for name, values, *_ in rows if name == "actor => rollout"] == [
        "weights, 1 update old, 2% changed"
    ]
    edges = (edge for edge in plan_json(plan, 0.0)["edges"] if edge["kind"] == "weights")
    assert {edge["target"]: edge["changed"] for edge in edges}["rollout"] == 0.02
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert edge_of(loaded).changed == 0.02
    assert loaded.hash == plan.hash != compiled(None, SLOW).hash


def test_they_make_a_second_host_worth_its_network() -> None:
    """Found free: all weights would take longer to get there than their step takes."""
    hosts = replace(SLOW, hosts=2, devices_per_host=1, inter_host=Link(1e8, 1e-5))
    small = "params.model=shape:qwen2.5-0.5b", "params.max_new_tokens=2048"
    changed, whole = (hflow.compile(graph_of(share, *small), hosts) for share in (0.02, None))
    assert edge_of(changed).changed and not {*edge_of(changed).source_mesh.devices} & {
        *edge_of(changed).target_mesh.devices
    }
    assert edge_of(whole).source_mesh == edge_of(whole).target_mesh
    assert changed.step_time_s < 0.9 * whole.step_time_s
    for search, step_s in ((plan.search, plan.step_time_s) for plan in (changed, whole)):
        assert search.gap == 0 and search.bound_s is not None and search.bound_s <= step_s


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("nodes.rollout.model={use: actor, delta_weights: 0.02}", "reads the newest weights"),
        ("models.actor.adapter=8", "of `actor` the adapter alone is sent"),
        ("nodes.ref_logprobs.model={use: ref, delta_weights: 0.02}", "reads the newest weights"),
    ],
)
def test_where_they_have_no_effect_is_told(said: str, told: str) -> None:
    with pytest.raises(HflowError) as caught:
        graph_of(0.02 if "models" in said else None, said)
    assert any(told in problem.message and problem.code == "HF212" for problem in caught.value.diagnostics)


@pytest.mark.parametrize("share", ["0", "1.5", "nan", "many"])
def test_a_share_is_above_0_and_at_most_1(share: str) -> None:
    with pytest.raises(HflowError):
        hflow.load("async_grpo", [f"nodes.rollout.model.delta_weights={share}"])


def test_every_form_of_a_graph_has_them(tmp_path: Path) -> None:
    """Printed, as YAML, and as a Python program."""
    graph = graph_of(0.02)
    file = tmp_path / "graph.yaml"
    file.write_text(to_yaml(graph))
    assert hflow.load(file) == graph
    assert "delta_weights(0.02)" in ir(graph)
    assert "delta_weights=0.02" in to_python(assembled(read_graph(file)))
