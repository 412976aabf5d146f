"""Interleaved pipeline stages: the same training as plain PyTorch's, with the layers in other places."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hflow.cost.working_memory import in_flight
from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.pipeline_stages import stage_chunks
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import Strategy
from tests.engines.models import ADAM, Folders
from tests.engines.processes import Pool
from tests.engines.test_strategies import train_on_rank, without_gradients
from tests.engines.test_train import MESHES, PPO, compare, reference, rollout

VPP = Strategy(vpp=2)
RECOMPUTE = replace(VPP, recompute="full")
LONG = MESHES | {"pp2cp2": Mesh.of((0, 1, 2, 3), pp=2, cp=2)}


def test_ranks_take_turns() -> None:
    """Of 16 layers on 4 ranks with 2 chunks each, as in figure 4 of arXiv:2104.04473."""
    assert [[*map(list, stage_chunks(16, 4, rank, 2))] for rank in range(4)] == [
        [[0, 1], [8, 9]],
        [[2, 3], [10, 11]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]


@pytest.mark.parametrize(
    ("micro_batches", "pp", "vpp"), [(2, 2, 2), (8, 2, 2), (8, 4, 2), (16, 4, 4), (3, 3, 2)]
)
def test_as_many_passes_are_in_flight_as_megatron_begins_with(micro_batches: int, pp: int, vpp: int) -> None:
    """And one more: it passes forward once before its first backward pass."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    import hflow.runtime.engines.megatron  # noqa: F401  (before Megatron)

    expected: list[int] = []
    for rank in (0, pp - 1):
        group: Any = SimpleNamespace(size=lambda: pp, rank=lambda rank=rank: rank)
        ends: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp)
        total, _, first, _ = get_pp_rank_microbatches(micro_batches, vpp, pp, p2p_communicator=ends)
        expected.append(min(first + 1, total))
    mesh = Mesh.of(tuple(range(pp)), pp=pp)
    assert in_flight(micro_batches, mesh, Strategy(vpp=vpp)) == tuple(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variant", "tied", "strategy"),
    [("pp2", "llama", False, VPP), ("pp2dp2", "qwen2", True, RECOMPUTE)],
)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, variant: str, tied: bool, strategy: Strategy
) -> None:
    check_gradients(pool, folders, layout, variant, tied, strategy)


@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize(
    ("layout", "variant", "tied", "strategy"),
    [
        ("pp2", "llama", True, RECOMPUTE),
        ("pp2dp2", "llama", True, VPP),
        ("tp2pp2", "qwen3 windows", True, replace(RECOMPUTE, sp=True)),
        ("pp2cp2", "llama", False, RECOMPUTE),
        ("pp2dp2", "qwen3_moe", False, replace(VPP, ep=2)),
        ("pp2", "gemma2", True, VPP),
    ],
)
def test_they_go_with_what_else_splits_a_model(
    pool: Pool, folders: Folders, layout: str, variant: str, tied: bool, strategy: Strategy
) -> None:
    check_gradients(pool, folders, layout, variant, tied, strategy)


def check_gradients(
    pool: Pool, folders: Folders, layout: str, variant: str, tied: bool, strategy: Strategy
) -> None:
    """Of 14 rows, of which each rank of dp cuts its own into some number of micro-batches."""
    folder, mesh = folders.of(variant, tied), LONG[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    arguments = folder, mesh, rollout(folder), options, 1, strategy
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)
    _assert_in_turns(folder, mesh, strategy, [found[1] for found in results])


def _assert_in_turns(folder: str, mesh: Mesh, strategy: Strategy, found: list[dict[str, Any]]) -> None:
    """Each rank has what the plan says, of layers that are no neighbours."""
    shape, sharding = read_shape(folder), Sharding.of(mesh, strategy)
    boxes = {p.name: weight_boxes(shape, sharding, p) for p in parameters(shape)}
    for rank, held in enumerate(found):
        assert {name: box for name, (box, *_) in held.items()} == {
            name: own[rank] for name, own in boxes.items() if rank in own
        }
        layers = {int(name.split(".")[2]) for name in held if name.startswith("model.layers.")}
        assert layers == ({0, 2} if mesh.coordinates(rank)["pp"] == 0 else {1, 3})


@pytest.mark.parametrize(("layout", "zero", "tied"), [("pp2", 0, True), ("pp2dp2", 1, True)])
def test_updates_equal_torch_adamw(pool: Pool, folders: Folders, layout: str, zero: Any, tied: bool) -> None:
    """Four updates with clipping and weight decay. Only weights are compared: with ZeRO-1 no rank has whole
    gradients."""
    folder, mesh = folders.of("llama", tied), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    arguments = folder, mesh, rollout(folder), options, 2, replace(RECOMPUTE, zero=zero)
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)
