"""Plans of models that are trained on one base: how they lie, what they count, and what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import hflow
from hflow.compiler.explain.alternatives import explain
from hflow.compiler.options import PlannerOptions
from hflow.compiler.planner.search import exhaustive, search
from hflow.compiler.state import Draft
from hflow.cost.device import BYTES
from hflow.diagnostics import HflowError
from hflow.graph.adapter import Adapter
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from hflow.plan.frozen import frozen_names, moved_parameters
from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.read_shape import named_shape
from hflow.view.terminal.remarks import remarks
from tests.compiler.small_cases import case, scarce_case, space_of

NAMED = ["params.model=shape:llama-7b", "params.reward_model=shape:llama-7b"]
F32 = [f"models.{name}.dtype=f32" for name in ("actor", "critic", "ref", "reward")]
ADAPTED = ["models.actor.adapter=16", "models.critic.adapter=16"]
SHARED = [*ADAPTED, "models.critic.base=actor"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A reward model that is an adapter on the base of 7B: config, and the head of a file of matrices."""
    folder, named = tmp_path_factory.mktemp("adapters"), named_shape("llama-7b")
    shape = replace(named.with_head("scalar"), adapter=Adapter(8, 16.0, ("q_proj", "v_proj")))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    heads = {
        f"base_model.model.{p.name}": {"dtype": "F32", "shape": p.shape} for p in moved_parameters(shape)
    }
    head = json.dumps(heads).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    own = "models.reward.adapter.path", "models.reward.path=shape:llama-7b", "models.reward.base=actor"
    return f"{own[0]}={folder}", *own[1:]


def ppo(*overrides: str) -> Graph:
    return hflow.load("ppo", [*NAMED, *F32, *overrides])


def compiled(*overrides: str, cluster: str = "a100x8", pins: tuple[str, ...] = (), **options: Any) -> Plan:
    return hflow.compile(ppo(*overrides), cluster, pins, **options)


def refused(*pins: str, **options: Any) -> tuple[str, str]:
    with pytest.raises(HflowError) as error:
        hflow.compile(ppo(*SHARED), "a100x8", pins, **options)
    (found,) = error.value.diagnostics
    return found.code, found.message


def test_the_base_counts_once() -> None:
    """Nothing else differs: with all models on the same devices, the best plan lies as before."""
    shared, apart = (compiled(*models, placement="colocate") for models in (SHARED, ADAPTED))
    assert [n.sharding for n in shared.nodes] == [n.sharding for n in apart.nodes]
    shape = shared.shapes["critic"]
    frozen = sum(p.size for p in parameters(shape) if p.name in frozen_names(shape, ()))
    peaks = [max(m.peak_bytes for m in plan.memory) for plan in (apart, shared)]
    assert peaks[0] - peaks[1] == frozen * BYTES["f32"]
    assert any(label.startswith("critic own weights") for label in shared.memory[0].parts)
    assert any("those of actor, on the same memory" in text for _, text in remarks(shared))


def test_a_plan_fits_that_would_not_with_two() -> None:
    cluster = load_cluster("h100x1")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=50 * 10**9))
    with pytest.raises(HflowError) as error:
        hflow.compile(ppo(*ADAPTED), cluster)
    assert [d.code for d in error.value.diagnostics] == ["HF305"]
    plan = hflow.compile(ppo(*SHARED), cluster)
    assert plan.node("actor_train").sharding == plan.node("critic_train").sharding


def test_what_needs_the_least_memory_has_one_base() -> None:
    """As it is told where nothing fits."""
    cluster = load_cluster("h100x1")
    with pytest.raises(HflowError) as error:
        hflow.compile(ppo(*SHARED), replace(cluster, device=replace(cluster.device, memory_bytes=20 * 10**9)))
    (found,) = error.value.diagnostics
    assert found.code == "HF305" and "actor weights" in found.help and "critic own weights" in found.help


def test_a_pin_of_one_is_one_of_the_other() -> None:
    plan = compiled(*SHARED, pins=("actor_train=tp2,dp2@4-7",))
    assert plan.node("critic_train").sharding == plan.node("actor_train").sharding
    assert plan.node("critic_train").mesh.devices == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("pins", "options", "code", "says"),
    [
        (("actor_train=tp2", "critic_train=tp4"), {}, "HF302", "share a base, so they lie alike"),
        (("actor_train=@0-3", "critic_train=@4-7"), {}, "HF302", "share a base, so they lie alike"),
        ((), {"placement": "split"}, "HF309", "puts `actor` and `critic` apart"),
        ((), {"placement": "standalone"}, "HF309", "puts `actor` and `critic` apart"),
        ((), {"planner": "hybridflow"}, "HF309", "cannot keep `base: actor` of `critic`"),
        ((), {"planner": "openrlhf"}, "HF309", "cannot keep `base: actor` of `critic`"),
    ],
)
def test_what_contradicts_is_refused(
    pins: tuple[str, ...], options: dict[str, Any], code: str, says: str
) -> None:
    found, message = refused(*pins, **options)
    assert found == code and says in message


def test_other_layouts_are_explained_with_both() -> None:
    """Of 7B, none but those in which both lie so."""
    plan = compiled(*SHARED, pins=("actor_train=tp2,dp4",))
    found = explain(plan, ("actor_train=tp2,dp4",), PlannerOptions(), "critic_train")
    assert found[0].layout.startswith("dp4 tp2") and found[0].reason == "pinned"
    assert any(a.step_time_s is not None for a in found[1:])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [case, scarce_case])
def test_search_finds_the_best_of_all_plans(make: Callable[..., Draft], seed: int) -> None:
    """As enumeration does; also where the least plan fits, or hardly more."""
    space = space_of(make("adapted_ppo", seed, most=1500))
    expected, found = exhaustive(space), search(space, float("inf"), resolution=0.0)
    assert (expected.choice is None) == (found.choice is None)
    if expected.choice and found.choice:
        assert found.choice.step_s == pytest.approx(expected.choice.step_s, rel=1e-9)
        (names,) = space.sharing
        assert len({found.choice.assignments[name].sharding for name in names}) == 1


def test_a_frozen_adapter_lies_on_its_base(judge: tuple[str, ...]) -> None:
    """It counts the adapter and the head alone, and lies as the trainer does."""
    shared, apart = (
        compiled(*SHARED, *own, placement="colocate") for own in (judge, (*judge, "models.reward.base=null"))
    )
    assert shared.node("reward").sharding == shared.node("actor_train").sharding
    mesh = shared.node("reward").mesh
    of_each = [
        next(size for label, size in plan.memory[0].parts.items() if label.startswith("reward "))
        for plan in (shared, apart)
    ]
    own = sum(p.size for p in moved_parameters(shared.shapes["reward"]))
    assert own * BYTES["f32"] / mesh.tp / mesh.pp / 1.01 < of_each[0] < of_each[1] / 100
    assert not shared.node("reward").offload
    texts = [text for _, text in remarks(shared)]
    assert any(t.startswith("reward: of rank 8") and "actor's base, on the same memory" in t for t in texts)


def test_a_pin_of_the_trainer_is_one_of_what_scores_on_its_base(judge: tuple[str, ...]) -> None:
    """And the other way; an offload, interleaved stages and other places are none."""
    for pin in ("actor_train=tp2,dp2,vpp1,zero1@4-7", "reward=tp2,dp2@4-7"):
        plan = compiled(*SHARED, *judge, pins=(pin,))
        assert len({plan.node(n).sharding for n in ("actor_train", "critic_train", "reward")}) == 1
        assert plan.node("reward").mesh.devices == (4, 5, 6, 7)
    for pins, says in (
        (("actor_train=tp2@0-3", "reward=tp2@4-7"), "share a base, so they lie alike"),
        (("actor_train=pp2,dp4,vpp2",), "one of them only scores"),
        (("reward=offload",), "are those of `actor`, which stay"),
    ):
        with pytest.raises(HflowError, match=f"HF302[\\s\\S]*{says}"):
            compiled(*SHARED, *judge, pins=pins)


def test_what_needs_the_least_memory_has_the_adapter_alone(judge: tuple[str, ...]) -> None:
    """One card holds four models of 7B, two of which are trained, on one base."""
    cluster = load_cluster("h100x1")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=50 * 10**9))
    assert hflow.compile(ppo(*SHARED, *judge), cluster)
    with pytest.raises(HflowError) as error:
        small = replace(cluster, device=replace(cluster.device, memory_bytes=20 * 10**9))
        hflow.compile(ppo(*SHARED, *judge), small)
    (found,) = error.value.diagnostics
    assert found.code == "HF305" and "reward own weights" in found.help


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [case, scarce_case])
def test_search_finds_the_best_with_a_frozen_one_as_well(
    make: Callable[..., Draft], seed: int, judge: tuple[str, ...]
) -> None:
    space = space_of(make("adapted_ppo", seed, most=1500, overrides=judge))
    expected, found = exhaustive(space), search(space, float("inf"), resolution=0.0)
    assert (expected.choice is None) == (found.choice is None)
    (names,) = space.sharing
    assert len(names) == 3
    if expected.choice and found.choice:
        assert found.choice.step_s == pytest.approx(expected.choice.step_s, rel=1e-9)
        assert len({found.choice.assignments[name].sharding for name in names}) == 1
