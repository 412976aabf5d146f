"""Every shipped algorithm runs, on one worker and on two, and the two agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import hflow
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.small_algorithms import make_models, small_graph

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
STEPS = 3


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Graph]:
    models = make_models(tmp_path_factory.mktemp("models"))
    return lambda path: small_graph(path, models, STEPS)


def on_one(graph: Graph) -> Plan:
    return hflow.compile(graph, "local1")


def on_two(graph: Graph) -> Plan:
    """Two data-parallel workers."""
    pins = [f"{node.name}=dp2@0-1" for node in graph.nodes if node.model]
    return hflow.compile(graph, "local", pins)


@pytest.fixture(scope="module")
def runs(
    workers: Pool, graph_of: Callable[[Path], Graph], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], tuple[Graph, Run, Run]]:
    """Both runs of an algorithm, made once."""
    made: dict[Path, tuple[Graph, Run, Run]] = {}
    folder = tmp_path_factory.mktemp("runs")

    def run(path: Path) -> tuple[Graph, Run, Run]:
        if path not in made:
            graph = graph_of(path)
            one, two = (
                execute(plan, folder / f"{path.stem}-{i}", pool=workers, export=False)
                for i, plan in enumerate((on_one(graph), on_two(graph)))
            )
            made[path] = graph, one, two
        return made[path]

    return run


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_it_runs_and_learns(path: Path, runs: Callable[[Path], tuple[Graph, Run, Run]]) -> None:
    graph, run, _ = runs(path)
    assert run.status == "finished" and len(run.metrics) == STEPS
    for step in run.metrics:
        for node in (n for n in graph.nodes if n.op == "train"):
            assert math.isfinite(step[f"loss.{node.name}"])
            assert step[f"{node.name}.grad_norm"] > 1e-6, "a loss without gradient learns nothing"
        for node in (n for n in graph.nodes if n.op == "generate"):
            assert int(step[f"digest.{node.name}"], 16)
    assert len(run.evaluations) == (2 if graph.evaluation else 0)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_two_workers_do_what_one_does(path: Path, runs: Callable[[Path], tuple[Graph, Run, Run]]) -> None:
    """Tokens are equal; losses within 1e-5 relative. An actor's loss is a mean of advantages around 1 that
    cancel: 1e-6 is a few roundings of these."""
    graph, one, two = runs(path)
    for mine, theirs in zip(two.metrics, one.metrics):
        for key in (k for k in theirs if k.startswith("digest.")):
            assert mine[key] == theirs[key], key
        for node in (n for n in graph.nodes if n.op == "train"):
            key = f"loss.{node.name}"
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    assert two.evaluations == pytest.approx(one.evaluations)
