"""A run that goes on under another plan, in the same workers, is the run that did not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import hflow
from benchmarks.replanning.growing import growing_model, growing_rows
from hflow.cli.resume import former_plan
from hflow.compiler.replan import replan_for_lengths
from hflow.graph.ir import Graph
from hflow.graph.lengths import Lengths
from hflow.graph.lengths_file import SeenLengths
from hflow.graph.run_config import CheckpointPolicy, ReplanPolicy, RunConfig
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.report.runs import list_runs
from hflow.runtime.controller.plan_history import PLANS, plan_began, plan_steps
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.replan.state_folder import KIND_OF_STATE, SHARED_MEMORY, SWITCHING
from hflow.runtime.run import Run
from hflow.view.measured import read_metrics
from tests.runtime.test_resume import assert_same, graph_of, plan_of, up_to

BATCH, SHORT, STEPS = 16, 6, 12
PLANNING = ReplanPolicy(every=2, moved=0.5, gain=0)
EVERY_STEP = RunConfig(CheckpointPolicy(every=1, keep=99), replan=PLANNING)
Maker = Callable[[Plan, Mapping[str, SeenLengths]], tuple[Plan | None, Plan]]


def growing(folder: Path, short: int = SHORT) -> Graph:
    growing_model(folder / "model")
    rows = growing_rows(folder / "rows.jsonl", BATCH * short, BATCH * (STEPS - short))
    said = {"model": folder / "model", "rows": rows, "steps": STEPS, "most": 48}
    return hflow.load(
        "benchmarks/replanning/growing.yaml", [f"params.{key}={value}" for key, value in said.items()]
    )


def costly(make: Maker) -> Maker:
    """As if the present plan took a hundred times as long: what steps take here decides nothing."""

    def made(plan: Plan, seen: Mapping[str, SeenLengths]) -> tuple[Plan | None, Plan]:
        old, new = make(plan, seen)
        assert old
        return replace(old, step_time_s=100 * old.step_time_s), new

    return made


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in found if event["event"] == kind]


def left_behind(run: Path) -> list[Path]:
    return [*SHARED_MEMORY.glob(f"hflow-{KIND_OF_STATE}-*"), *run.glob(SWITCHING)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return growing(tmp_path_factory.mktemp("growing"))


@dataclass(frozen=True)
class Made:
    """A run whose responses grow, the plan that it began with, what it told, and the processes of its workers
    before and after it."""

    run: Run
    plan: Plan
    told: str
    pids: tuple[list[int], list[int]]


def pids(workers: Pool) -> list[int]:
    own: Any = workers
    return [process.pid for process in own._workers.processes]


@pytest.fixture(scope="module")
def replanned(workers: Pool, graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Made:
    plan, told, before = hflow.compile(graph, "local4"), StringIO(), pids(workers)
    run = execute(
        plan,
        tmp_path_factory.mktemp("replanned") / "run",
        pool=workers,
        config=EVERY_STEP,
        console=Console(file=told, width=200),
        replan_for_lengths=costly(replan_for_lengths),
    )
    return Made(run, plan, told.getvalue(), (before, pids(workers)))


def test_a_run_whose_responses_grow_goes_on_under_another_plan(
    replanned: Made, workers: Pool, tmp_path: Path
) -> None:
    run, plan = replanned.run, replanned.plan
    lengths = [line["rollout.response_length"] for line in run.metrics]
    assert max(lengths[:SHORT]) < 3 and min(lengths[SHORT:]) > 20
    switches = events(run.folder, "replanned")
    assert switches and all(SHORT < event["step"] < STEPS for event in switches)
    undisturbed = execute(plan, tmp_path / "run", pool=workers, export=False)
    for ours, theirs in zip(run.metrics, undisturbed.metrics, strict=True):
        assert_same(ours, theirs, "replanned")
    last, summary = load_plan(run.folder / "plan.json"), json.loads((run.folder / "summary.json").read_text())
    assert last.hash == switches[-1]["plan"] == summary["plan_hash"]
    assert [node.mesh for node in last.nodes] != [node.mesh for node in plan.nodes]
    assert last.graph.node("rollout").lengths != plan.graph.node("rollout").lengths
    assert replanned.pids[0] == replanned.pids[1], "in the same workers"
    assert f"another plan after {switches[0]['step']} steps: tokens of rollout 2 -> " in replanned.told
    assert not left_behind(run.folder)


def test_the_folder_says_which_step_ran_under_which_plan(replanned: Made) -> None:
    folder, switches = replanned.run.folder, events(replanned.run.folder, "replanned")
    steps = [0, *(event["step"] for event in switches)]
    assert plan_steps(folder) == steps and plan_began(folder) == steps[-1]
    plans = [load_plan(folder / PLANS / f"step-{step:08d}.json") for step in steps]
    assert [plan.hash for plan in plans] == [replanned.plan.hash, *(event["plan"] for event in switches)]
    ran = [[line["step"] for line in read_metrics(folder, plan)] for plan in plans]
    assert ran == [list(range(a, b)) for a, b in pairwise((*steps, STEPS))]
    (listed,) = list_runs(folder.parent)
    assert listed.steps == STEPS
    chosen = [event for event in events(folder, "planned") if event.get("chosen")]
    assert [event["plan"] for event in chosen] == [event["plan"] for event in switches]


def test_a_run_that_died_after_it_goes_on_under_the_last_plan(
    replanned: Made, workers: Pool, tmp_path: Path
) -> None:
    """From a checkpoint of another plan, too: then the last plan has begun with its step."""
    switch = events(replanned.run.folder, "replanned")[0]["step"]
    for step in (switch - 1, STEPS - 1):
        folder = up_to(replanned.run.folder, step, tmp_path / str(step))
        plan = former_plan(folder)
        resumed = execute(plan, folder, pool=workers, export=False, resume=True)
        for ours, theirs in zip(resumed.metrics, replanned.run.metrics, strict=True):
            assert_same(ours, theirs, "resumed")
        assert plan_steps(folder) == ([0, step] if step < switch else plan_steps(replanned.run.folder))
        assert load_plan(folder / PLANS / f"step-{plan_began(folder):08d}.json").hash == plan.hash


@pytest.mark.rotating(6)
def test_a_run_whose_lengths_stay_is_never_planned_again(tmp_path: Path) -> None:
    graph = growing(tmp_path, short=STEPS)
    asked: list[Plan] = []

    def make(plan: Plan, seen: Mapping[str, SeenLengths]) -> tuple[Plan, Plan]:
        asked.append(plan)
        return plan, plan

    for times, mean in enumerate((2.0, 40.0)):
        run = execute(
            hflow.compile(_stating(graph, mean), "local1"), tmp_path / f"run{times}", workers="inline",
            export=False, config=RunConfig(replan=replace(PLANNING, moved=0.2)), replan_for_lengths=make,
        )  # fmt: skip
        assert len(asked) == times, "once, where it was planned for others"
        assert not events(run.folder, "replanned") and not (run.folder / PLANS).exists()


LAYOUTS = ("tp2@0-1", "pp2,tp2@0-3", "dp2,zero1@0-1", "")


@pytest.mark.parametrize("name", ["everything", "region", "by_success"])
def test_all_that_a_run_carries_goes_to_other_layouts(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path, name: str
) -> None:
    """Moments, older weights, averages, rows that wait, counts: over plans of all sizes, with evaluations."""
    graph = graph_of(name, tiny_model, tiny_reward, steps=14)
    plans = [plan_of(graph, layout) for layout in LAYOUTS]
    waiting = iter(plans)

    def make(plan: Plan, seen: Mapping[str, SeenLengths]) -> tuple[Plan, Plan]:
        return replace(plan, step_time_s=100.0), replace(next(waiting, plan), step_time_s=0.001)

    policy = ReplanPolicy(every=1, moved=0, gain=0)
    first = plan_of(graph, "dp2,zero1@0-1")
    undisturbed = execute(first, tmp_path / "one", pool=workers)
    run = execute(
        first, tmp_path / "two", pool=workers, config=RunConfig(replan=policy), replan_for_lengths=make
    )
    switches = [
        load_plan(run.folder / PLANS / f"step-{step:08d}.json") for step in plan_steps(run.folder)[1:]
    ]
    assert len(switches) == len(events(run.folder, "replanned")) >= 1
    assert [plan.nodes for plan in switches] == [plan.nodes for plan in plans[: len(switches)]]
    for ours, theirs in zip(run.metrics, undisturbed.metrics, strict=True):
        assert_same(ours, theirs, str(ours["step"]))
    assert run.evaluated.keys() == undisturbed.evaluated.keys()
    for key, values in undisturbed.evaluated.items():
        assert run.evaluated[key] == pytest.approx(values, abs=1e-6), key


def _stating(graph: Graph, mean: float) -> Graph:
    """That responses have so many tokens."""
    nodes = (replace(n, lengths=Lengths(mean, 48)) if n.op == "generate" else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
