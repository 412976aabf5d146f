"""A run whose rollouts get new weights while they sample goes on. Chance decides which token sees which
weights, so its tokens are no other run's; but what is true of every such run stays true."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.plan.cluster_file import load_cluster
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from tests.installed import needs_sglang
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_resume import EVERY, up_to
from tests.runtime.test_sglang import assert_versions, model

__all__ = ["model"]  # the fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_sglang,
]
STEPS, STOPPED = 4, 2
PROMPTS, SAMPLES = 8, 2
SEEN = """\
hflow: 1
nodes:
  prompts: {out: {tokens: "i32[batch, prompt~]", question: "str[batch]"}}
  questions: {op: call, fn: "FUNCTIONS:seen", in: {text: prompts.question}}
  answers: {op: call, fn: "FUNCTIONS:seen", in: {text: rollout.text}}
"""


def test_no_row_is_lost_or_doubled_and_versions_are_right(workers: Pool, model: Path, tmp_path: Path) -> None:
    more = tmp_path / "seen.yaml"
    more.write_text(SEEN.replace("FUNCTIONS", str(GRAPHS / "functions.py")))
    graph = hflow.load(GRAPHS / "in_flight.yaml", [f"params.model={model}", f"params.steps={STEPS}"], [more])
    pins = "rollout=tp2@1-2", "actor_train=tp1@0", "scored=tp1@0"
    plan = hflow.compile(graph, load_cluster("local4"), pins, engines=["rollout=sglang"])
    whole = execute(plan, tmp_path / "whole", pool=workers, config=EVERY, export=False)
    folder = up_to(whole.folder, STOPPED, tmp_path / "run")
    resumed = execute(plan, folder, pool=workers, config=EVERY, export=False, resume=True)
    assert [line["step"] for line in resumed.metrics] == list(range(STEPS))
    assert resumed.metrics[:STOPPED] == whole.metrics[:STOPPED]
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        assert ours["questions.checksum"] == theirs["questions.checksum"]
        assert (ours["questions.whole"], ours["answers.whole"]) == (PROMPTS, PROMPTS * SAMPLES)
        assert_versions(ours, ours["step"])
    assert len({line["questions.checksum"] for line in resumed.metrics}) == STEPS
    assert any(line["rollout.renewed_tokens"] for line in resumed.metrics[STOPPED:])
