"""Steps are pipelined: meshes that exchange nothing work on different steps at the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run

GRAPH = Path(__file__).parent / "graphs/lagged.yaml"
STEPS = 8
APART = ("rollout=dp2@2-3", "actor_train=dp2@0-1")
ALONE = ("rollout=tp1@0", "actor_train=tp1@0")


def trained(workers: Pool, model: Path, folder: Path, pins: tuple[str, ...], lag: int) -> Run:
    given = [f"params.model={model}", f"params.steps={STEPS}", "params.lr=1e-3", f"params.lag={lag}"]
    plan = hflow.compile(hflow.load(GRAPH, given), "clusters/local4.yaml", pins)
    return execute(plan, folder, pool=workers, export=False)


def spans(run: Run, node: str) -> dict[int, tuple[float, float]]:
    """When the node began and ended in each step, on any worker."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()
    ]
    ran = [e for e in lines if e["event"] == "ran" and e["name"] == node]
    of_steps = {step: [e for e in ran if e["step"] == step] for step in range(STEPS)}
    return {
        step: (min(e["start_s"] for e in events), max(e["end_s"] for e in events))
        for step, events in of_steps.items()
    }


def overlapping(run: Run) -> list[int]:
    """The steps during whose training the rollout of the next one began."""
    rollouts, trainings = spans(run, "rollout"), spans(run, "actor_train")
    return [step for step in range(STEPS - 1) if rollouts[step + 1][0] < trainings[step][1]]


@pytest.fixture(scope="module")
def lagged(workers: Pool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(workers, tiny_model, tmp_path_factory.mktemp("lagged") / "run", APART, 1)


def test_a_lagged_rollout_overlaps_with_training(lagged: Run) -> None:
    assert len(overlapping(lagged)) > (STEPS - 1) / 2


def test_without_lag_nothing_overlaps(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    assert overlapping(trained(workers, tiny_model, tmp_path / "run", APART, 0)) == []


def test_the_trajectory_is_that_of_one_worker(
    lagged: Run, workers: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """One worker does everything in order. Tokens are equal; losses differ by rounding."""
    alone = trained(workers, tiny_model, tmp_path / "run", ALONE, 1)
    assert overlapping(alone) == []
    for ours, theirs in zip(lagged.metrics, alone.metrics, strict=True):
        assert ours["digest.rollout"] == theirs["digest.rollout"]
        assert ours["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5)
    assert len({m["digest.rollout"] for m in alone.metrics}) == STEPS
    assert lagged.evaluations == pytest.approx(alone.evaluations)


def test_steps_take_the_time_since_the_one_before(lagged: Run) -> None:
    """Though two are in flight, their times add up to no more than the run's."""
    assert sum(m["time_s"] for m in lagged.metrics) <= lagged.wall_s
