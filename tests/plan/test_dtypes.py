"""Models whose graph leaves their dtype to the cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.cli.resume import own_graph
from hflow.diagnostics import HflowError
from hflow.graph.changes import check_changes
from hflow.graph.ir import Graph
from hflow.graph.load import load_text
from hflow.graph.write.yaml_printer import to_yaml
from hflow.plan.cluster_file import load_cluster
from hflow.plan.dtypes import keep_dtypes, with_dtypes
from hflow.plan.plan_file import load_plan
from hflow.runtime.tools.new_model import new_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    new_model(folder, layers=1, hidden=16, heads=2, ffn=16)
    return f"params.model={folder}"


def grpo(*overrides: str) -> Graph:
    return hflow.load("grpo", overrides)


def dtypes(graph: Graph) -> dict[str, str]:
    return {model.name: model.dtype for model in graph.models}


@pytest.mark.parametrize(("cluster", "dtype"), [("local", "f32"), ("h100x1", "bf16"), ("rtx4090x1", "bf16")])
def test_the_cluster_decides(cluster: str, dtype: str, model: str, tmp_path: Path) -> None:
    plan = hflow.compile(grpo(model), cluster)
    assert dtypes(plan.graph) == dict.fromkeys(("actor", "ref"), dtype)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").graph == plan.graph


def test_what_is_said_stays() -> None:
    graph = grpo("models.actor.dtype=f32", "models.ref.dtype=bf16")
    for cluster in ("local", "h100x1"):
        assert dtypes(with_dtypes(graph, load_cluster(cluster))) == {"actor": "f32", "ref": "bf16"}
    assert load_text(to_yaml(graph)) == graph


def test_no_dtype_is_written_where_none_was_said() -> None:
    assert set(dtypes(grpo()).values()) == {"auto"}
    assert "dtype" not in to_yaml(grpo())


def test_a_plan_keeps_its_dtype_elsewhere(model: str) -> None:
    """A run that goes on with its own graph, on another cluster, compiles the graph of its plan."""
    plan = hflow.compile(grpo(model), "local")
    assert dtypes(hflow.compile(plan.graph, "h100x1").graph) == {"actor": "f32", "ref": "f32"}


def test_a_resumed_run_keeps_its_dtype(model: str) -> None:
    former = hflow.compile(grpo(model), "local").graph
    kept = keep_dtypes(former, grpo(model, "nodes.actor_train.with.lr=2e-6"))
    assert dtypes(kept) == {"actor": "f32", "ref": "f32"}
    assert not check_changes(former, keep_dtypes(former, grpo(model)), ())


def test_a_resumed_run_does_not_change_its_dtype_unasked(model: str) -> None:
    former = hflow.compile(grpo(model), "local").graph
    said = keep_dtypes(former, grpo(model, "models.actor.dtype=bf16"))
    with pytest.raises(HflowError) as caught:
        check_changes(former, said, ())
    assert "the other dtype" in str(caught.value)


def test_a_model_on_the_base_of_another_has_its_dtype(model: str) -> None:
    """Also where the other's was known before: its weights are in memory once."""
    adapted = grpo(model, "models.actor.adapter=8")
    judge = replace(adapted.models[0], name="judge", frozen=True, base="actor")
    with_judge = replace(adapted, models=(*adapted.models, judge))
    kept = keep_dtypes(hflow.compile(adapted, "local").graph, with_judge)
    assert dtypes(kept) == {"actor": "f32", "judge": "f32"}


def test_a_plan_without_a_dtype_is_refused(model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    hflow.compile(grpo(model), "local").save(file)
    plan = json.loads(file.read_text())
    plan["step"]["graph"]["models"][0]["dtype"] = "auto"
    file.write_text(json.dumps(plan))
    with pytest.raises(HflowError, match="has no dtype"):
        load_plan(file)


def test_the_graph_of_a_run_keeps_its_dtype(model: str, tmp_path: Path) -> None:
    """`compile --from RUN --set …` reads the run's graph file, which may say none."""
    former = hflow.compile(grpo(model), "local").graph
    (tmp_path / "graph.yaml").write_text(to_yaml(grpo(model)))
    again = own_graph(tmp_path, former, (), ("nodes.actor_train.with.lr=2e-6",))
    assert dtypes(again) == {"actor": "f32", "ref": "f32"}


def test_a_model_that_comes_in_is_left_to_the_cluster(model: str) -> None:
    former = hflow.compile(grpo(model), "local").graph
    alone = replace(former, models=former.models[:1])
    assert dtypes(keep_dtypes(alone, grpo(model))) == {"actor": "f32", "ref": "auto"}
