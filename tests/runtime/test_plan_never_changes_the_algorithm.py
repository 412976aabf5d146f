"""The runtime's master test: every plan of one graph gives the trajectory of the one-worker plan.

`test_matrix.py` has more plans, of two algorithms.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run

GRAPH = Path(__file__).parent / "grpo_small.yaml"
STEPS = 4

PLANS = {
    "one worker": ("rollout=tp1@0", "ref_logprobs=tp1@0", "actor_train=tp1@0"),
    "dp2": ("rollout=dp2@0-1", "ref_logprobs=dp2@0-1", "actor_train=dp2@0-1"),
    "tp2": ("rollout=tp2@0-1", "ref_logprobs=tp2@0-1", "actor_train=tp2@0-1"),
    "pp2": ("rollout=dp2@0-1", "ref_logprobs=pp2@0-1", "actor_train=pp2@0-1"),
    "tp2 dp2 -> tp1": ("rollout=dp4@0-3", "ref_logprobs=tp2,dp2@0-3", "actor_train=tp2,dp2@0-3"),
    "pp3, uneven": ("rollout=dp2@0-1", "ref_logprobs=pp3@0-2", "actor_train=pp3@1-3"),
    "pp2 vpp2": ("rollout=dp2@0-1", "ref_logprobs=pp2@0-1", "actor_train=pp2,vpp2@0-1"),
    "pp2 tp2 -> tp2": ("rollout=tp2,dp2@0-3", "ref_logprobs=dp4@0-3", "actor_train=pp2,tp2@0-3"),
    "cp2": ("rollout=dp2@0-1", "ref_logprobs=cp2@0-1", "actor_train=cp2,zero1@0-1"),
    "cp2 tp2 sp -> tp2": (
        "rollout=tp2,dp2@0-3", "ref_logprobs=cp2,tp2,sp@0-3", "actor_train=cp2,tp2,sp,zero1,recompute@0-3",
    ),
    "tp1 -> tp2, apart": ("rollout=tp2@2-3", "ref_logprobs=tp1@1", "actor_train=dp2@0-1"),
}  # fmt: skip


def compiled(model: Path, pins: tuple[str, ...]) -> Plan:
    graph = hflow.load(GRAPH, [f"params.model={model}", f"params.steps={STEPS}"])
    return hflow.compile(graph, "clusters/local4.yaml", pins)


@pytest.fixture(scope="module")
def trajectories(workers: Pool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    runs: dict[str, Run] = {}
    for name, pins in PLANS.items():
        plan = compiled(tiny_model, pins)
        runs[name] = execute(plan, folder / name.replace(" ", "_"), pool=workers)
    return runs


def losses(run: Run) -> list[float]:
    return [m["loss.actor_train"] for m in run.metrics]


def digests(run: Run) -> list[str]:
    return [m["digest.rollout"] for m in run.metrics]


def test_something_is_learned(trajectories: dict[str, Run]) -> None:
    """The comparison below would hold for a run in which nothing happens; this one is not such."""
    run = trajectories["one worker"]
    assert len(run.metrics) == STEPS
    assert len(set(digests(run))) == STEPS
    assert all(m["actor_train.grad_norm"] > 1e-3 for m in run.metrics)
    assert any(abs(loss) > 1e-4 for loss in losses(run))
    assert run.metrics[-1]["actor_train.kl"] > 1e-7


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one worker"])
def test_same_trajectory(trajectories: dict[str, Run], name: str) -> None:
    """Tokens are equal, losses within 1e-5 relative. A GRPO loss is a difference of advantages that
    cancel, so 1e-5 is relative to the larger of the loss and 1e-2, the size of what cancels."""
    one, other = trajectories["one worker"], trajectories[name]
    assert digests(other) == digests(one)
    for mine, theirs in zip(losses(other), losses(one)):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    for mine, theirs in zip(other.metrics, one.metrics):
        assert mine["reward_mean"] == pytest.approx(theirs["reward_mean"], rel=1e-6)
        assert mine["actor_train.grad_norm"] == pytest.approx(theirs["actor_train.grad_norm"], rel=1e-4)
    assert other.evaluations == pytest.approx(one.evaluations)


EQUAL_REWARDS = """
from hflow.ops.op import op

@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def constant(text, answer):
    return [[0.7] * len(row) for row in text]
"""


def test_plans_agree_where_nothing_is_to_be_learned(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """All rewards are equal: a gradient would be rounding, another under every plan, and Adam would take it
    at full step size. The actor stays the reference, so that the penalty stays rounding too."""
    (tmp_path / "rewards.py").write_text(EQUAL_REWARDS)
    (tmp_path / "graph.yaml").write_text(GRAPH.read_text().replace(":digits", ":constant"))
    found: list[list[str]] = []
    for name in ("one worker", "tp2", "pp2"):
        graph = hflow.load(tmp_path / "graph.yaml", [f"params.model={tiny_model}", "params.steps=3"])
        plan = hflow.compile(graph, "clusters/local4.yaml", PLANS[name])
        run = execute(plan, tmp_path / name, pool=workers, export=False)
        updates = 4.0  # two epochs of two minibatches
        assert [m["actor_train.skipped_updates"] for m in run.metrics] == [updates] * 3
        assert [m["actor_train.kl"] for m in run.metrics] == pytest.approx([0.0] * 3, abs=1e-9)
        found.append(digests(run))
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


def test_exported_models_agree(trajectories: dict[str, Run]) -> None:
    """What dp2, tp2 and pp2 export is the one worker's model up to the noise of reductions."""
    from safetensors.torch import load_file

    one = load_file(trajectories["one worker"].folder / "export/actor/model.safetensors")
    for name in PLANS:
        other = load_file(trajectories[name].folder / "export/actor/model.safetensors")
        assert other.keys() == one.keys()
        worst = max(float((other[key] - one[key]).abs().max()) for key in one)
        assert worst < 2e-4, name  # Adam's first steps turn rounding noise into up to lr = 1e-3


def test_a_saved_plan_runs_as_it_is(workers: Pool, tiny_model: Path, tmp_path: Path, trajectories) -> None:
    plan = compiled(tiny_model, PLANS["tp2"])
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    run = execute(again, tmp_path / "run", pool=workers, export=False)
    assert digests(run) == digests(trajectories["tp2"])
    assert losses(run) == losses(trajectories["tp2"])
