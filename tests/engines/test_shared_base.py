"""Two models on the base of one: on every rank, what neither trains has one memory."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.plan.layout import Mesh
from hflow.plan.parameters import SCALAR_HEAD
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from tests.engines.models import ADAM, Folders, make_engine, read_weights
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO

ACTOR, CRITIC = Adapter(4, 6.0, ADAPTER_TARGETS), Adapter(3, 4.0, ("q_proj", "v_proj", "down_proj"))
OPTIONS = ADAM | PPO


def on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, strategy: Strategy
) -> tuple[int, int, set[str], set[str]]:
    """Bytes of the actor's weights and of both models'; the critic's parameters that are not on the actor's
    memory, and those that hold other values than a critic by itself."""
    what = rank, new_group, folder, mesh
    actor = make_engine(*what, OPTIONS, adapter=ACTOR, strategy=strategy)
    more = {"head": "scalar", "adapter": CRITIC, "strategy": strategy}
    critic = make_engine(*what, OPTIONS, base=actor.weights, **more)
    alone = read_weights(make_engine(*what, OPTIONS, **more))
    there = {p.untyped_storage().data_ptr() for p in actor.model.parameters()}
    places = critic.weights.places.items()
    apart = {n for n, place in places if place.storage.untyped_storage().data_ptr() not in there}
    own = read_weights(critic)
    differing = {name for name, (_, values) in alone.items() if not (values == own[name][1]).all()}
    both = [*actor.model.parameters(), *critic.model.parameters()]
    return _bytes(actor.model.parameters()), _bytes(both), apart, differing


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("layout", "tied", "strategy"),
    [
        ("tp2", False, PLAIN),
        ("pp2", True, PLAIN),
        ("pp2", False, Strategy(vpp=2)),
        ("dp2", True, Strategy(zero=1)),
    ],
)
def test_what_neither_trains_is_there_once(
    pool: Pool, folders: Folders, layout: str, tied: bool, strategy: Strategy
) -> None:
    folder, mesh = folders.of("qwen2", tied), MESHES[layout]
    for actor, both, apart, differing in pool.run(2, on_rank, folder, mesh, strategy):
        assert apart and all(".lora_" in name or name == SCALAR_HEAD for name in apart)
        assert not differing
        assert 0 < both - actor < actor / 4
