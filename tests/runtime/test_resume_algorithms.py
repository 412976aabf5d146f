"""The shipped algorithms go on from a checkpoint of any step, on the same plan and on others.

Together they carry all that a run can: a critic, weights that lag, a refreshed reference, a multiplier that
follows from all steps before, and prompts that wait in a region.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hflow
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan
from hflow.plan.run_state import run_state
from hflow.runtime.checkpoint.manifest import read_manifest
from hflow.runtime.controller.checkpoints import complete, name_of
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.small_algorithms import make_models, small_graph
from tests.runtime.test_resume import EVERY, LAYOUTS, assert_same, plan_of, untimed, up_to, weights

STEPS = 3
# More is drawn than a step takes, and what is left waits for the next one.
WAITING = ["nodes.sampling.until.max_age=1", "nodes.actor_train.with.max_lag=1", "params.batch=4",
           "params.draw=12", "params.minibatch=8"]  # fmt: skip
# By name: what makes them small, and a tensor that a checkpoint of each must hold.
CASES: dict[str, tuple[list[str], str]] = {
    "ppo": ([], "models/critic/exp_avg_sq/"),
    "grpo": ([], "models/actor/exp_avg/"),
    "dapo": (WAITING, "regions/sampling/waiting/"),
    "async_grpo": ([], "models/actor/lagging/"),
    "safe_rlhf": ([], "carried/"),
    "iterative_grpo": (["params.refresh=2"], "models/actor/refreshed/ref/"),
    "cost_model": ([], "models/cost/exp_avg/"),
}


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graph]:
    models = make_models(tmp_path_factory.mktemp("models"))
    return lambda name: small_graph(Path(f"algorithms/{name}.yaml"), models, STEPS, CASES[name][0])


@pytest.fixture(scope="module")
def whole(
    graph_of: Callable[[str], Graph], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Plan, Run]]:
    """The undisturbed run of an algorithm on one worker, here, with a checkpoint of each step; made once."""
    made: dict[str, tuple[Plan, Run]] = {}
    folder = tmp_path_factory.mktemp("whole")

    def run(name: str) -> tuple[Plan, Run]:
        if name not in made:
            plan = hflow.compile(graph_of(name), "local1")
            made[name] = plan, execute(plan, folder / name, workers="inline", config=EVERY)
        return made[name]

    return run


@pytest.mark.matrix
@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("name", CASES)
def test_on_the_same_plan_it_is_bit_equal(
    whole: Callable[[str], tuple[Plan, Run]], tmp_path: Path, name: str, step: int
) -> None:
    plan, undisturbed = whole(name)
    folder = up_to(undisturbed.folder, step, tmp_path / "run")
    resumed = execute(plan, folder, workers="inline", config=EVERY, resume=True)
    assert untimed(resumed) == untimed(undisturbed) and len(resumed.metrics) == STEPS
    assert resumed.evaluations == undisturbed.evaluations
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
    ours, theirs = weights(folder), weights(undisturbed.folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [*LAYOUTS, ""])
@pytest.mark.parametrize("name", CASES)
def test_on_other_plans_it_samples_the_same(
    whole: Callable[[str], tuple[Plan, Run]],
    workers: Pool,
    graph_of: Callable[[str], Graph],
    tmp_path: Path,
    name: str,
    layout: str,
) -> None:
    _, undisturbed = whole(name)
    step = 1 + (*LAYOUTS, "").index(layout) % (STEPS - 1)
    folder = up_to(undisturbed.folder, step, tmp_path / "run")
    plan = plan_of(graph_of(name), layout)
    resumed = execute(plan, folder, pool=workers, export=False, resume=True)
    for ours, theirs in zip(resumed.metrics, undisturbed.metrics, strict=True):
        assert_same(ours, theirs, layout)


@pytest.mark.parametrize("name", CASES)
def test_its_checkpoints_hold_what_it_is_here_for(
    whole: Callable[[str], tuple[Plan, Run]], name: str
) -> None:
    """In one of them at least, and not of size 0."""
    plan, run = whole(name)
    assert sorted(complete(run.folder)) == list(range(1, STEPS + 1))
    held = [read_manifest(run.folder / "checkpoints" / name_of(step)).tensors for step in range(1, STEPS + 1)]
    found = [(t, s) for tensors in held for t, s in tensors.items() if t.startswith(CASES[name][1])]
    assert any(all(stored.shape) for _, stored in found), sorted(held[-1])
    assert all(tensors.keys() <= {t.name for t in run_state(plan)} for tensors in held)
