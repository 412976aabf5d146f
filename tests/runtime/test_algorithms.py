"""Every shipped algorithm runs, on one worker and on two, and the two agree.

The models are tiny and random, so the rule that judges sums is replaced by one that rewards any text with
digits (`./rewards.py`); everything else is as shipped.
"""

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
from hflow.runtime.tools.new_model import new_model

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
DENSE = f"{Path(__file__).parent / 'rewards.py'}:digits"
STEPS = 3

GROUPED = ["params.group=4", "params.minibatch=16"]
SINGLE = ["params.minibatch=4"]
# What makes an algorithm small, besides the number of steps and the models.
SMALL = {
    "sft": [],
    "dpo": [],
    "ppo": SINGLE,
    "safe_rlhf": SINGLE,
    "remax": [*SINGLE, f"nodes.reward.fn={DENSE}", f"nodes.greedy_reward.fn={DENSE}"],
    "reinforce_pp": [*SINGLE, f"nodes.reward.fn={DENSE}"],
    "on_policy_distillation": SINGLE,
    "online_dpo": ["params.minibatch=8", f"nodes.reward.fn={DENSE}"],
    "dapo": [*GROUPED, "params.draw=6", f"nodes.sampling.nodes.reward.fn={DENSE}"],
    "iterative_grpo": [*GROUPED, "params.refresh=1", f"nodes.reward.fn={DENSE}"],
    "tool_grpo": [
        *GROUPED,
        "params.max_new_tokens=6",
        f"nodes.reward.fn={DENSE}",
        *(f"nodes.tool_{turn}.fn={DENSE.replace('digits', 'remark')}" for turn in (1, 2)),
    ],  # random models call no calculator
}
DEFAULT = [*GROUPED, f"nodes.reward.fn={DENSE}"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that the params `model`, `teacher`, `reward_model` and `cost_model` name."""
    folder = tmp_path_factory.mktemp("models")
    seeds = {"model": 3, "teacher": 4, "reward_model": 5, "cost_model": 6}
    for name, seed in seeds.items():
        new_model(
            folder / name, layers=2, hidden=32, heads=4, ffn=64, alphabet="0123456789+-=. ", max_positions=64,
            seed=seed, head="scalar" if seed > 4 else "lm",
        )  # fmt: skip
    return {name: folder / name for name in seeds}


@pytest.fixture(scope="module")
def graph_of(models: dict[str, Path]) -> Callable[[Path], Graph]:
    def load(path: Path) -> Graph:
        params = hflow.load(path).params
        given = [f"params.{name}={folder}" for name, folder in models.items() if name in params]
        small = {"steps": STEPS, "batch": 8, "holdout": 8}
        given += [f"params.{name}={value}" for name, value in small.items() if name in params]
        return hflow.load(path, [*given, *SMALL.get(path.stem, DEFAULT)])

    return load


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
