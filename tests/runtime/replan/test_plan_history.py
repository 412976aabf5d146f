"""Which step of a run ran under which plan, as its folder says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.runtime.controller.plan_history import PLANS, plan_began, plan_steps, record_plans, resume_plans
from hflow.view.measured import read_metrics


@pytest.fixture(scope="module")
def plans(tiny_model: Path) -> list[Plan]:
    graph = hflow.load("tests/runtime/grpo_small.yaml", [f"params.model={tiny_model}"])
    return [hflow.compile(graph, "local4", f"actor_train={layout}@0-1") for layout in ("dp2", "tp2", "pp2")]


def recorded(run: Path) -> dict[int, str]:
    """The hash of each plan by the step that it began with."""
    return {step: load_plan(run / PLANS / f"step-{step:08d}.json").hash for step in plan_steps(run)}


def test_plans_of_steps_that_are_made_again_are_forgotten(plans: list[Plan], tmp_path: Path) -> None:
    a, b, c = plans
    resume_plans(tmp_path, a, 5)
    assert recorded(tmp_path) == {} and plan_began(tmp_path) == 0, "one plan is plan.json"
    record_plans(tmp_path, a, b, 20)
    record_plans(tmp_path, b, c, 40)
    assert recorded(tmp_path) == {0: a.hash, 20: b.hash, 40: c.hash} and plan_began(tmp_path) == 40
    resume_plans(tmp_path, c, 50)
    assert plan_steps(tmp_path) == [0, 20, 40], "the same plan goes on"
    resume_plans(tmp_path, c, 30)
    assert recorded(tmp_path) == {0: a.hash, 20: b.hash, 30: c.hash}
    resume_plans(tmp_path, a, 0)
    assert recorded(tmp_path) == {0: a.hash}


def test_steps_are_compared_with_the_plan_that_they_ran_under(plans: list[Plan], tmp_path: Path) -> None:
    """Begun under a, b from step 3 on; then ended, and resumed at step 2 under b, and c from step 5 on."""
    a, b, c = plans
    events: list[dict[str, object]] = [
        {"time": 1.0, "event": "started", "plan": a.hash},
        {"event": "ran", "step": 0, "name": "rollout"},
        {"time": 2.0, "event": "replanned", "plan": b.hash, "step": 3},
        {"time": 3.0, "event": "resumed", "plan": b.hash, "step": 2},
        {"time": 4.0, "event": "replanned", "plan": c.hash, "step": 5},
    ]
    cut_off = '{"time": 5.0, "event": "resumed", "pl'
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + cut_off)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(8)))
    steps = [[line["step"] for line in read_metrics(tmp_path, plan)] for plan in plans]
    assert steps == [[0, 1], [2, 3, 4], [5, 6, 7]]
    other = hflow.compile(a.graph, "local4", "actor_train=tp1@0")
    with pytest.raises(HflowError, match=f"HF306.*of plan {a.hash}, then {b.hash}, then {c.hash}, not of"):
        read_metrics(tmp_path, other)
