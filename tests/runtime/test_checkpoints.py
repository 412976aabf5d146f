"""When a checkpoint counts as written, and which ones are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy
from hflow.runtime.checkpoint.written import WrittenPart
from hflow.runtime.controller.best_checkpoint import NO_SCORES, Scores, best_of, may_be_best, scores
from hflow.runtime.controller.checkpoints import Checkpoints
from tests.runtime.test_resume import GRAPHS

STEPS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def graph(tiny_model: Path) -> Graph:
    return hflow.load(GRAPHS.parent / "grpo_small.yaml", [f"params.model={tiny_model}", "params.steps=8"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_folder_that_cannot_be_made_fails_one_checkpoint(
    workers: int, graph: Graph, tmp_path: Path
) -> None:
    """Reports of other calls may come before and after those of the workers that could not write either."""
    (tmp_path / "checkpoints").write_text("a file")
    told: list[str] = []
    plan = hflow.compile(graph, "local1")
    policy = CheckpointPolicy(every=1)
    kept = Checkpoints(tmp_path, plan, policy, workers, lambda *_, **__: None, told.append)
    kept.begin(1)
    kept.add([{}] * workers, lambda: NO_SCORES)
    kept.began(1, [{"stall_s": 0.0}] * workers)
    failed: dict[str, Any] = {"written": [WrittenPart(1, error="no folder")]}
    for _ in range(workers):
        assert not told
        kept.add([failed], lambda: NO_SCORES)
    assert len(told) == 1 and "step 1 could not be written" in told[0] and "checkpoints" in told[0]


def kept_of(graph: Graph, best: str, metrics: int, evaluations: dict[int, float]) -> set[int]:
    lines = [{"step": step, "loss.actor_train": -float(step)} for step in range(metrics)]
    known = scores(graph, best, lines, evaluations, {})
    return may_be_best(STEPS, CheckpointPolicy(best=best), known)


def test_the_best_is_kept_and_what_may_still_be_better(graph: Graph) -> None:
    """Steps 1 to 4 have checkpoints. A metric of steps comes with the step, and one that is no step's never;
    an evaluation comes where it is due."""
    assert kept_of(graph, "loss.actor_train", 4, {}) == {1}
    assert kept_of(graph, "loss.actor_train", 3, {}) == {1, 4}
    assert kept_of(graph, "loss.actor_trian", 4, {}) == set()
    assert kept_of(graph, "", 4, {}) == set()
    assert kept_of(graph, "reward.score", 4, {0: 0.5}) == set()


def test_evaluations_that_are_due_may_still_come(tiny_model: Path) -> None:
    sets = [f"params.model={tiny_model}", "params.steps=4", "eval.every=2"]
    graph = hflow.load(GRAPHS.parent / "grpo_small.yaml", sets)
    assert kept_of(graph, "reward.score", 4, {0: 0.5}) == {2, 4}
    assert kept_of(graph, "reward.score", 4, {0: 0.5, 2: 0.1}) == {2, 4}
    assert kept_of(graph, "reward.score", 4, {0: 0.5, 2: 0.1, 4: 0.3}) == {4}


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_first_of_equal_scores_is_the_best(mode: Any, best: int) -> None:
    known = Scores({1: 0.5, 2: 0.9, 3: 0.1, 4: 0.9, 5: 0.1}, lambda step: False)
    assert best_of((5, 4, 3, 2, 1, 7), CheckpointPolicy(best="reward_mean", mode=mode), known) == best
