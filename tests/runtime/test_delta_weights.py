"""Runs whose rollouts get, from another host, the weights alone that have changed: the same tokens and losses
as where all weights are sent, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hflow
from hflow.plan.cluster import Link
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.installed import needs_sglang
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_bytes import measured
from tests.runtime.test_resume import EVERY, up_to

STEPS = 4
HOSTS = replace(load_cluster("local4"), name="two", hosts=2, devices_per_host=2, inter_host=Link(1e6, 1e-3))
LAYOUTS = {
    "tp2 | dp2": ("actor_train=tp2@0-1", "rollout=dp2@2-3"),
    "dp2 | tp2": ("actor_train=dp2,zero1@0-1", "rollout=tp2@2-3"),
    "pp2 | one": ("actor_train=pp2@0-1", "rollout=tp1@3"),
}


def plan_of(model: Path, pins: tuple[str, ...], share: float | None, engine: str = "megatron") -> Plan:
    """Of a step that changes few weights of bf16: its learning rate is small."""
    given = [f"params.model={model}", f"params.steps={STEPS}", "params.lr=1e-5", "models.actor.dtype=bf16"]
    given += [f"nodes.rollout.model.delta_weights={share}"] if share else []
    graph = hflow.load(GRAPHS / "lagged.yaml", given)
    return hflow.compile(graph, HOSTS, pins, engines=(f"rollout={engine}",))


def run_of(plan: Plan, folder: Path, workers: Pool) -> Run:
    return execute(plan, folder, pool=workers, export=False, config=EVERY)


def told(run: Run, name: str) -> list[float | None]:
    return [line.get(name) for line in run.metrics]


def untold(run: Run) -> list[dict[str, float]]:
    """The metrics that do not depend on time and bytes."""
    kept = ("digest.rollout", "loss.actor_train", "actor_train.grad_norm")
    return [{name: line[name] for name in kept} for line in run.metrics]


def weight_bytes(run: Run) -> list[int]:
    """Of each step, to all readers."""
    found = [0] * STEPS
    for (_, step, _), size in measured(run, "weights", "bytes").items():
        found[step] += size
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_the_same(workers: Pool, tiny_model: Path, tmp_path: Path, name: str) -> None:
    whole, changed = (
        run_of(plan_of(tiny_model, LAYOUTS[name], share), tmp_path / str(share), workers)
        for share in (None, 0.05)
    )
    assert untold(changed) == untold(whole)
    assert len(set(told(changed, "digest.rollout"))) == STEPS
    shares = told(changed, "rollout.changed_weights")
    assert shares[0] is None and all(share and 0 < share < 0.3 for share in shares[1:])
    assert set(told(whole, "rollout.changed_weights")) == {None}
    assert len(set(weight_bytes(whole))) == 1
    assert all(few < all_ for few, all_ in zip(weight_bytes(changed)[1:], weight_bytes(whole)[1:]))


def test_a_resumed_run_is_the_same(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """What a checkpoint brings is sent whole, and compared with from then on; also where the run had sent all
    before."""
    whole, changed = (plan_of(tiny_model, LAYOUTS["dp2 | tp2"], share) for share in (None, 0.05))
    undisturbed = run_of(changed, tmp_path / "whole", workers)
    for plan in (changed, whole):
        folder = up_to(undisturbed.folder, 2, tmp_path / plan.hash)
        resumed = execute(plan, folder, pool=workers, export=False, config=EVERY, resume=True)
        assert untold(resumed) == untold(undisturbed)
    assert told(undisturbed, "rollout.changed_weights")[3]


@needs_sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_gets_them(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """What SGLang reads back has the checksum of all weights, also of those that did not travel."""
    pins = ("actor_train=tp2@0-1", "rollout=tp1@3")
    whole, changed = (
        run_of(plan_of(tiny_model, pins, share, "sglang"), tmp_path / str(share), workers)
        for share in (None, 0.05)
    )
    assert told(changed, "digest.rollout") == told(whole, "digest.rollout")
    assert all(share and 0 < share < 0.3 for share in told(changed, "rollout.changed_weights")[1:])
