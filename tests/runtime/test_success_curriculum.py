"""A run whose rows are drawn by success: what its samples say decides what later steps draw."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import hflow
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.plan.run_state import DATA_STATE
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.controller.checkpoints import name_of
from hflow.runtime.controller.pool import Pool
from hflow.runtime.run import Run
from tests.runtime.matrix import GRAPHS

STEPS, LAG = 5, 2
CONFIG = RunConfig(CheckpointPolicy(every=1, keep=9), export="none", samples=SamplePolicy(every=1))
ROWS = [json.loads(line) for line in Path("tests/runtime/sums.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("by_success") / "run"
    params = [f"params.{p}" for p in (f"model={tiny_model}", f"steps={STEPS}", f"lag={LAG}")]
    plan = hflow.compile(hflow.load(GRAPHS / "by_success.yaml", params), "local1")
    return hflow.execute(plan, run_dir=folder, workers="inline", config=CONFIG)


def sampled(run: Run, step: int) -> Mapping[int, list[float]]:
    """The rewards of each row of a step, as its table of samples has them."""
    found: dict[int, list[float]] = {}
    for row in run.samples(step).to_pylist():
        assert row["prompt"] == f"{ROWS[row['data_row']]['question']}="
        found.setdefault(row["data_row"], []).append(row["reward"])
    return found


def test_checkpoints_count_what_the_samples_say(run: Run) -> None:
    """After step t the rewards of steps up to t - 2 have been counted: each is right from 0.1 on, and old
    counts fade by 0.75."""
    for done in range(1, STEPS + 1):
        counts: dict[int, tuple[float, float]] = {}
        for step in range(max(0, done - LAG)):
            for row, rewards in sampled(run, step).items():
                tries, right = (0.75 * count for count in counts.get(row, (0.0, 0.0)))
                counts[row] = tries + len(rewards), right + sum(reward >= 0.1 for reward in rewards)
        reader = CheckpointReader(run.folder / "checkpoints" / name_of(done))
        tries, right = (reader.whole(f"{DATA_STATE}/prompts/{n}") for n in ("tries", "successes"))
        assert sorted(counts.values()) == sorted((t, s) for t, s in zip(tries.tolist(), right.tolist()) if t)
        waiting = reader.whole(f"{DATA_STATE}/prompts/drawn").tolist()
        assert len(waiting) == min(done, LAG) and all(len(set(rows)) == 16 for rows in waiting)
        carried = reader.whole("carried/reward.score").tolist()
        expected = [
            [reward for rewards in sampled(run, step).values() for reward in rewards]
            for step in range(max(0, done - LAG), done)
        ]
        assert carried == expected
        assert int((tries > 0).sum()) == run.metrics[min(done, STEPS) - 1]["prompts.tried_rows"]
        reader.close()


@pytest.mark.slow
def test_counts_decide_which_rows_come_next(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    """The first steps, which have nothing to go by, draw as they would whatever the rewards are; others do
    not: with a threshold that nothing reaches, the same seed draws other rows."""
    never = "nodes.prompts.with.curriculum.threshold=2"
    params = [f"params.{p}" for p in (f"model={tiny_model}", f"steps={STEPS}", f"lag={LAG}")]
    plan = hflow.compile(hflow.load(GRAPHS / "by_success.yaml", [*params, never]), "local1")
    other = hflow.execute(plan, run_dir=tmp_path / "run", workers="inline", config=CONFIG)
    alike = [list(sampled(run, step)) == list(sampled(other, step)) for step in range(STEPS)]
    assert all(alike[:LAG]) and not all(alike[LAG:])
    expected = other.metrics[2]["prompts.expected_success"]
    tried = set(sampled(other, 0)) & set(sampled(other, 2))
    assert expected == pytest.approx((0.4 * (16 - len(tried)) + 0.4 / 5 * len(tried)) / 16)
    assert math.isfinite(expected) and len(set(sampled(other, 2))) == 16


def test_a_model_on_stages_may_be_the_judge(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    """Only its last stage has the scores that are carried; the run goes on where one device has them all."""
    judged = tmp_path / "judged.yaml"
    judged.write_text(
        f"""hflow: 1
extends: {(GRAPHS / "by_success.yaml").resolve()}
name: judged
models:
  judge: {{path: {tiny_reward}, head: scalar, frozen: true}}
nodes:
  prompts: {{with: {{tokenizer: actor, curriculum: {{success: score.score, threshold: 0}}}}}}
  score: {{op: score, model: judge, in: {{tokens: rollout.tokens}}}}
"""
    )
    graph = hflow.load(judged, [f"params.model={tiny_model}", "params.steps=4"])
    actor = ["actor_train=dp2@0-1", "rollout=dp2@0-1"]
    apart, alone = (
        hflow.compile(graph, "local4", [*actor, f"score={way}"]) for way in ("pp2,dp2@0-3", "tp1@2")
    )
    whole = hflow.execute(apart, run_dir=tmp_path / "whole", pool=workers, config=CONFIG)
    part = tmp_path / "part"
    shutil.copytree(whole.folder, part)
    for later in (3, 4):
        shutil.rmtree(part / "checkpoints" / name_of(later))
    resumed = hflow.execute(alone, run_dir=part, pool=workers, config=CONFIG, resume=True)
    told = ("digest.rollout", "prompts.tried_rows", "prompts.expected_success")
    assert [[line[k] for k in told] for line in resumed.metrics] == [
        [line[k] for k in told] for line in whole.metrics
    ]
    assert whole.metrics[-1]["prompts.tried_rows"] > 16
