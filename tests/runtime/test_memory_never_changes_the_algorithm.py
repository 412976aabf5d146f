"""ZeRO-1, recompute, offload and release in real workers: the plain plan's results in less memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.cost.resident_memory import optimizer_bytes, resident_bytes
from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan
from hflow.plan.program import Onload
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.controller.pool import Pool
from hflow.runtime.controller.worker_failure import WorkerFailure
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.memory import put_away, with_strategy

GRAPH = Path(__file__).parent / "grpo_small.yaml"
STEPS = 3
Change = Callable[[Plan], Plan]

ONE = ("rollout=tp1@0", "ref_logprobs=tp1@0", "actor_train=tp1@0")
DP2 = ("rollout=tp2@0-1", "ref_logprobs=dp2@0-1", "actor_train=dp2@0-1")
MIXED = ("rollout=dp4@0-3", "ref_logprobs=tp2,dp2@0-3", "actor_train=tp2,dp2@0-3")
APART = ("rollout=tp2@2-3", "ref_logprobs=tp1@1", "actor_train=pp2@0-1")
AWAY = ("actor_train", "ref_logprobs")


def changed(strategy: Strategy, away: Iterable[str] = (), released: Iterable[str] = ()) -> Change:
    return lambda plan: put_away(with_strategy(plan, "actor_train", strategy), away, released)


PLANS: dict[str, tuple[tuple[str, ...], Change]] = {
    "plain": (ONE, lambda plan: plan),
    "one": (ONE, changed(Strategy("full", 1), AWAY)),
    "zero1": (DP2, changed(Strategy(zero=1), (), ("rollout",))),
    "all": (MIXED, changed(Strategy("full", 1), AWAY, ("rollout",))),
    "apart": (APART, changed(Strategy("full"), AWAY, ("rollout",))),
}
CHANGED = [name for name in PLANS if name != "plain"]


def compiled(model: Path, pins: tuple[str, ...]) -> Plan:
    graph = hflow.load(GRAPH, [f"params.model={model}", f"params.steps={STEPS}"])
    return hflow.compile(graph, "clusters/local4.yaml", pins)


@pytest.fixture(scope="module")
def runs(workers: Pool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    plans = {name: change(compiled(tiny_model, pins)) for name, (pins, change) in PLANS.items()}
    return {name: execute(plan, folder / name, pool=workers) for name, plan in plans.items()}


@pytest.mark.parametrize("name", CHANGED)
def test_same_trajectory(runs: dict[str, Run], name: str) -> None:
    """Tokens are equal, losses within 1e-5, relative to 1e-2 where less: what cancels in them is so large."""
    plain, other = runs["plain"], runs[name]
    assert len({line["digest.rollout"] for line in plain.metrics}) == STEPS
    for mine, theirs in zip(other.metrics, plain.metrics, strict=True):
        assert mine["digest.rollout"] == theirs["digest.rollout"]
        assert mine["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5, abs=1e-7)
        assert mine["actor_train.grad_norm"] == pytest.approx(theirs["actor_train.grad_norm"], rel=1e-4)
    assert other.evaluations == pytest.approx(plain.evaluations)


@pytest.mark.parametrize("name", CHANGED)
def test_same_export(runs: dict[str, Run], name: str) -> None:
    from safetensors.torch import load_file

    mine, theirs = (load_file(runs[n].folder / "export/actor/model.safetensors") for n in (name, "plain"))
    assert mine.keys() == theirs.keys()
    # Adam's first steps turn rounding noise into up to lr = 1e-3
    assert max(float((mine[key] - theirs[key]).abs().max()) for key in theirs) < 2e-4


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("one", Mesh.of((0,)), PLAIN),
        ("all", Mesh.of((0, 1, 2, 3), dp=2, tp=2), Strategy("full", 1)),
        ("apart", Mesh.of((0, 1), pp=2), PLAIN),
    ],
)
def test_as_many_bytes_move_as_the_planner_counts(
    runs: dict[str, Run], tiny_model: Path, name: str, mesh: Mesh, strategy: Strategy
) -> None:
    """In every step on the fullest device of the trainer: its optimizer's state there and back (Megatron
    rounds parts up to 128 elements); the frozen model's weights come, and are dropped."""
    moved: dict[tuple[str, str], dict[int, list[int]]] = {}
    for event in _events(runs[name].folder):
        where = moved.setdefault((event["kind"], event["name"]), {}).setdefault(event["device"], [])
        where.append(event["bytes"])
    shape = read_shape(str(tiny_model))
    state = optimizer_bytes(shape, "f32", mesh, strategy)
    for kind, skipped in (("onload", 1), ("offload", 0)):  # before the first update there is no state
        steps = list(zip(*moved[kind, f"{kind} actor_train"].values()))
        assert len(steps) == STEPS
        assert all(state <= max(sizes) <= state + 8 * 128 for sizes in steps[skipped:])
    (ref,) = (n.mesh for n in compiled(tiny_model, PLANS[name][0]).nodes if n.node == "ref_logprobs")
    onloads = moved["onload", "onload ref_logprobs"]
    weights = resident_bytes(shape, "f32", ref, False)
    assert {size for sizes in onloads.values() for size in sizes} == {weights}
    assert not any(sum(sizes) for sizes in moved["offload", "offload ref_logprobs"].values())


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "ran"]


@pytest.mark.rotating(6)
def test_a_frozen_model_that_is_refreshed_may_be_away(tiny_model: Path, tmp_path: Path) -> None:
    """Its weights are written while the old ones are in the host's memory, and then must replace them there.
    One worker does the same sums in the same order: nothing differs."""
    text = GRAPH.read_text().replace("frozen: true}", "frozen: true, refresh: {from: actor, every: 2}}")
    (tmp_path / GRAPH.name).write_text(text.replace("./rewards.py", f"{GRAPH.parent}/rewards.py"))
    graph = hflow.load(tmp_path / GRAPH.name, [f"params.model={tiny_model}", "params.steps=4"])
    plan = hflow.compile(graph, "clusters/local1.yaml", ONE)
    plans = {"stays": plan, "away": put_away(plan, ("ref_logprobs",))}
    losses = [
        [line["loss.actor_train"] for line in execute(p, tmp_path / name, workers="inline").metrics]
        for name, p in plans.items()
    ]
    assert losses[0] == losses[1]
    onloads = [e["bytes"] for e in _events(tmp_path / "away") if e["name"] == "onload ref_logprobs"]
    assert [size > 0 for size in onloads] == [True, True, False, True]  # step 2 found them written there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ("ref_logprobs", "the weights it reads were released or offloaded"),
        ("actor_train", "its optimizer's state was offloaded"),
    ],
)
def test_a_plan_that_brings_nothing_back_fails(
    tiny_model: Path, tmp_path: Path, node: str, problem: str
) -> None:
    plan = put_away(compiled(tiny_model, ONE), [node])
    kept = tuple(i for i in plan.step.instructions if not isinstance(i, Onload))
    broken = replace(plan, step=replace(plan.step, instructions=kept))
    with pytest.raises(WorkerFailure, match=f"HF401(.|\n)*{problem}"):
        execute(broken, tmp_path / "run", workers="inline")
