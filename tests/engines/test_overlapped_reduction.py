"""Gradients that are summed over data-parallel ranks while others are computed are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import optimizer
from tests.engines.models import ADAM, Folders, make_engine
from tests.engines.processes import Pool
from tests.engines.test_strategies import ZERO, train_on_rank, without_gradients
from tests.engines.test_train import MESHES, PPO, compare, reference, rollout

BUCKET = 3000  # elements: every layer's gradients are several messages
UPDATES, EPOCHS = 2, 2
OPTIONS: dict[str, Any] = ADAM | PPO | {"aggregate": "token_mean"}
CP2DP2 = Mesh.of((0, 1, 2, 3), dp=2, cp=2)


@contextmanager
def overlapping(strategy: Strategy) -> Iterator[list[bool]]:
    """On CPUs, too; gives for each bucket, when the backward passes have ended, whether it is under way."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # after hflow

    begun: list[bool] = []
    finish = _ParamAndGradBucketGroup.finish_grad_sync

    def finish_watched(group: Any, *args: Any, **options: Any) -> None:
        begun.append(group.grad_reduce_handle is not None)
        finish(group, *args, **options)

    # Only with this option does Megatron wait for what our reduce-scatter gives.
    waits = {"reduce_scatter_with_fp32_accumulation": strategy.zero > 0}
    small = partial(optimizer.DistributedDataParallelConfig, bucket_size=BUCKET, **waits)
    with (
        patch.object(optimizer, "OVERLAPPING", ("cpu",)),
        patch.object(optimizer, "DistributedDataParallelConfig", small),
        patch.object(_ParamAndGradBucketGroup, "finish_grad_sync", finish_watched),
    ):
        yield begun


def overlapped_on_rank(*arguments: Any) -> Any:
    with overlapping(arguments[-1]) as begun:
        return *train_on_rank(*arguments)[:2], begun


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("dp2", PLAIN),
        ("dp2", Strategy("full")),
        ("tp2dp2", PLAIN),
        ("pp2dp2", PLAIN),
        ("cp2dp2", PLAIN),
        ("dp2", ZERO),
        ("tp2dp2", ZERO),
        ("pp2dp2", Strategy("full", 1)),
        ("cp2dp2", ZERO),
    ],
)
def test_updates_equal_plain_pytorchs(pool: Pool, folders: Folders, layout: str, strategy: Strategy) -> None:
    folder, mesh = folders.of("llama", True), (MESHES | {"cp2dp2": CP2DP2})[layout]
    metrics, named = reference(folder, rollout(folder), OPTIONS, UPDATES, EPOCHS)
    arguments = folder, mesh, rollout(folder), OPTIONS, UPDATES, strategy
    results = pool.run(len(mesh.devices), overlapped_on_rank, *arguments)
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    compare(parts, metrics, weights, atol=1e-5)  # rounding of small gradients grows over four updates
    for rank, (_, _, begun) in enumerate(results):
        buckets, rest = divmod(len(begun), UPDATES * EPOCHS)
        first = mesh.coordinates(rank)["pp"] == 0
        later = 1 + strategy.zero  # with ZeRO-1, tied embeddings are a message of their own
        assert (buckets > 3 if first else buckets == later) and not rest, (
            "later stages wait for the first anyway"
        )
        assert not any(begun[:buckets]), "Megatron counts the gradients of the first update"
        assert all(begun[buckets:])


def setting_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, strategy: Strategy = PLAIN
) -> bool:
    with overlapping(strategy):
        adam = make_engine(rank, new_group, folder, mesh, OPTIONS, strategy=strategy).adam
    assert adam
    return adam._chunks[0].ddp_config.overlap_grad_reduce


def test_some_gradients_wait(pool: Pool, folders: Folders) -> None:
    """Of one replica; of experts, which no token may reach."""
    dense, dp2 = folders.of("llama", True), MESHES["dp2"]
    assert pool.run(2, setting_on_rank, dense, dp2) == [True, True]
    assert pool.run(2, setting_on_rank, dense, MESHES["tp2"]) == [False, False]
    assert pool.run(2, setting_on_rank, folders.of("mixtral", False), dp2) == [False, False]
    assert pool.run(2, setting_on_rank, dense, dp2, ZERO) == [True, True]


def test_without_a_gpu_they_wait() -> None:
    """Two cores gain nothing from it: sending takes time from computing."""
    assert optimizer.OVERLAPPING == ("cuda",)
