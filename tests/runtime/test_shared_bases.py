"""Two trained models on one base: it is there once, and nothing that they learn changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hflow
from hflow.diagnostics import HflowError
from hflow.plan.frozen import frozen_names
from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.plan_file import load_plan
from hflow.plan.verify.consistency import inconsistencies
from hflow.runtime.controller.inline_pool import InlinePool
from hflow.runtime.controller.pool import Pool
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.matrix import GRAPHS
from tests.runtime.memory import kept_bytes, put_away
from tests.runtime.test_resume import EVERY, up_to, weights

# Of all nodes but the rollout, and of the rollout.
LAYOUTS = {
    "one worker": ("tp1@0", "tp1@0"),
    "tp2": ("tp2@0-1", "tp2@0-1"),
    "dp2": ("dp2@0-1", "dp2@0-1"),
    "pp2": ("pp2@0-1", "dp2@0-1"),
}
READERS = ("reward", "values", "ref_logprobs")
APART = ["models.critic.base=null"]


class Models:
    """The folders that graphs begin with."""

    def __init__(self, model: Path, reward: Path):
        self.params = [f"params.model={model}", f"params.reward_model={reward}", "params.steps=2"]

    def plan(self, layout: str, *more: str, values: str = "") -> Plan:
        graph = hflow.load(GRAPHS / "adapted_ppo.yaml", [*self.params, *more])
        others, rollout = LAYOUTS[layout]
        pins = dict.fromkeys((*READERS, "actor_train", "critic_train"), others)
        pins |= {"rollout": rollout} | ({"values": values} if values else {})
        if "dp2" in others:
            pins |= {name: others.replace("dp2", "dp2,zero1") for name in ("actor_train", "critic_train")}
        cluster = "local1" if layout == "one worker" else "local4"
        return hflow.compile(graph, cluster, [f"{name}={where}" for name, where in pins.items()])


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_reward: Path) -> Models:
    return Models(tiny_model, tiny_reward)


def untimed(run: Run) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not k.startswith(("time_s", "tokens_per_s"))}
        for line in run.metrics
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_learned_is_the_same(workers: Pool, models: Models, tmp_path: Path, layout: str) -> None:
    """To the last bit: metrics, tokens, and the merged weights that are exported."""
    plans = models.plan(layout), models.plan(layout, *APART)
    shared, apart = (execute(p, tmp_path / str(i), pool=workers) for i, p in enumerate(plans))
    assert untimed(shared) == untimed(apart)
    assert shared.metrics[-1]["loss.actor_train"] != shared.metrics[0]["loss.actor_train"]
    found, expected = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert found.keys() == expected.keys() and any(name.startswith("critic/") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_reader_elsewhere_has_a_base_of_its_own(workers: Pool, models: Models, tmp_path: Path) -> None:
    """Values of a critic that lie otherwise than its trainer; the rollout of pp2 has one as well."""
    plans = [models.plan("tp2", *more, values="dp2@0-1") for more in ([], APART)]
    shared, apart = (execute(p, tmp_path / str(i), pool=workers, export=False) for i, p in enumerate(plans))
    assert untimed(shared) == untimed(apart)


def test_a_run_goes_on_in_another_layout(workers: Pool, models: Models, tmp_path: Path) -> None:
    """With one base or with two: checkpoints hold neither."""
    first = execute(models.plan("tp2"), tmp_path / "run", pool=workers, config=EVERY)
    expected = weights(first.folder)
    for number, plan in enumerate((models.plan("pp2"), models.plan("dp2", *APART))):
        folder = up_to(first.folder, 1, tmp_path / str(number))
        execute(plan, folder, pool=workers, config=EVERY, resume=True)
        found = weights(folder)
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.fixture
def inline() -> Iterator[InlinePool]:
    with closing(InlinePool()) as pool:
        yield pool


def engines(pool: InlinePool) -> dict[str, MegatronModel]:
    assert pool.worker.interpreter
    found = pool.worker.interpreter.engines.models.items()
    return {instance.model: engine for instance, engine in found if isinstance(engine, MegatronModel)}


def state_bytes(models: dict[str, MegatronModel]) -> int:
    """Of all weights, gradients and moments, memory that several have once."""
    every = [p.data for engine in models.values() for p in engine.model.parameters()]
    for adam in (engine.adam for engine in models.values() if engine.adam):
        every += [*adam.state(), *adam._gradients()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every}
    return sum(storages.values())


def base_bytes(plan: Plan) -> int:
    """What the critic has of the base, in f32."""
    shape = plan.shapes["critic"]
    frozen = frozen_names(shape, ())
    return 4 * sum(p.size for p in parameters(shape) if p.name in frozen)


def on_one_memory(plan: Plan, models: dict[str, MegatronModel]) -> set[bool]:
    """Whether the frozen parameters of the critic lie where the actor's do."""
    actor, critic = (models[name].weights for name in ("actor", "critic"))
    names = frozen_names(plan.shapes["critic"], ())
    assert len(names) > 20
    return {actor.view(n, actor.box(n)).data_ptr() == critic.view(n, critic.box(n)).data_ptr() for n in names}


@pytest.mark.slow
def test_the_base_is_there_once(inline: InlinePool, models: Models) -> None:
    """As it is loaded, and after a step in which optimizers leave the device; a plan counts it once."""
    plans = [models.plan("one worker", *more) for more in (APART, [])]
    inline.form(1)
    measured: list[int] = []
    for plan in plans:
        inline.call("load", put_away(plan, ("actor_train", "critic_train")))
        for engine in engines(inline).values():
            engine.onload()
        measured.append(state_bytes(engines(inline)))
        assert measured[-1] == kept_bytes(plan)
    apart, shared = measured
    assert apart - shared == base_bytes(plans[0])
    assert on_one_memory(plans[1], engines(inline)) == {True}
    inline.call("run", 0)
    for engine in engines(inline).values():
        engine.onload()
    assert on_one_memory(plans[1], engines(inline)) == {True}
    assert state_bytes(engines(inline)) == shared


def test_an_edited_plan_that_parts_them_is_refused(models: Models, tmp_path: Path) -> None:
    plan = models.plan("tp2")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").hash == plan.hash
    critic = plan.node("critic_train")
    mesh = replace(critic.mesh, devices=critic.mesh.devices[::-1])
    nodes = tuple(replace(n, mesh=mesh) if n is critic else n for n in plan.nodes)
    found = "`critic` is trained in another layout than `actor`, whose base it has"
    assert found in [*inconsistencies(replace(plan, nodes=nodes))]
    replace(plan, nodes=nodes).save(tmp_path / "plan.json")
    with pytest.raises(HflowError, match="contradicts itself"):
        load_plan(tmp_path / "plan.json")
