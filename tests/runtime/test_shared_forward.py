"""A forward pass that a score node shares with the first update of its model: the same run, in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.graph.ir import Graph
from hflow.plan.plan import Plan
from hflow.plan.strategy import Strategy
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.small_algorithms import make_models, small_graph

STEPS = 3
PAIRS = {"values": "critic_train", "old_logprobs": "actor_train"}
# The critic's pair and the actor's, each on the mesh of its own.
LAYOUTS: dict[str, tuple[str, Strategy]] = {
    "one": ("tp1@0", Strategy()),
    "recompute": ("tp1@0", Strategy("full")),
    "dp2 zero1": ("dp2@0-1", Strategy(zero=1)),
    "tp2 sp": ("tp2@0-1", Strategy(sp=True)),
    "cp2": ("cp2@0-1", Strategy()),
    "tp2 dp2": ("tp2,dp2@0-3", Strategy("full", zero=1)),
}
MICRO = 3  # rows; the last micro-batch of a minibatch has fewer


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """PPO whose actor scores its own samples again, too, and an evaluation of what the critic says, which is
    trained on nothing."""
    text = Path("algorithms/ppo.yaml").read_text()
    text = text.replace("old_logprobs: rollout.logprobs", "old_logprobs: old_logprobs.logprobs")
    node = "  old_logprobs: {op: score, model: actor, in: {tokens: rollout.tokens}}\n\n"
    text += "\nevaluations: {held: {rows: 8, every: 1, metrics: {score: values.score}}}\n"
    path = tmp_path_factory.mktemp("graphs") / "ppo.yaml"
    path.write_text(text.replace("  shaped:\n", f"{node}  shaped:\n", 1))
    models = make_models(tmp_path_factory.mktemp("models"))
    more = ["params.batch=16", "params.minibatch=8", "params.max_new_tokens=6"]
    more += [f"nodes.{trainer}.repeat.epochs=2" for trainer in PAIRS.values()]
    return small_graph(path, models, STEPS, more)


def planned(graph: Graph, layout: str, shares: bool) -> Plan:
    pins, strategy = LAYOUTS[layout]
    names = (*PAIRS, *PAIRS.values())
    placed = [f"{name}={pins}" for name in names] + ["rollout=dp4@0-3", "ref_logprobs=tp1@1", "reward=tp1@2"]
    plan = hflow.compile(graph, "clusters/local4.yaml", placed)
    own = replace(strategy, share_forward=shares)
    nodes = (replace(n, strategy=own, micro_batch=MICRO) if n.node in names else n for n in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


@pytest.mark.rotating(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_trajectory(workers: Pool, graph: Graph, tmp_path: Path, layout: str) -> None:
    """Tokens are equal; values, losses and gradients, which pass other kernels, nearly."""
    runs: dict[bool, Run] = {}
    for shares in (False, True):
        plan = planned(graph, layout, shares)
        runs[shares] = execute(plan, tmp_path / str(shares), pool=workers)
    for mine, theirs in zip(runs[True].metrics, runs[False].metrics, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["digest.rollout"] == theirs["digest.rollout"]
        for name in ("values.values", "values.score", "old_logprobs.entropy", "actor_train.mismatch"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        for trainer in PAIRS.values():
            assert mine[f"loss.{trainer}"] == pytest.approx(theirs[f"loss.{trainer}"], rel=1e-4, abs=1e-6)
            own = mine[f"{trainer}.grad_norm"], theirs[f"{trainer}.grad_norm"]
            assert own[0] == pytest.approx(own[1], rel=1e-3)
    assert runs[True].evaluations == pytest.approx(runs[False].evaluations)
    held, as_held = (runs[shares].evaluated["eval/held/score"] for shares in (True, False))
    assert len(held) == STEPS + 1 and held == pytest.approx(as_held, rel=1e-4)
