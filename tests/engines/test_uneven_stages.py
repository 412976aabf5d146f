"""Four layers on three pipeline stages: the same training and log-probs as plain PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.pipeline_stages import stage_sizes
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from tests.engines.models import ADAM, Folders
from tests.engines.processes import Pool
from tests.engines.test_strategies import train_on_rank, without_gradients
from tests.engines.test_train import PPO, compare, reference, rollout

PP3 = Mesh.of((0, 1, 2), pp=3)
RECOMPUTE = Strategy(recompute="full")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("strategy", [PLAIN, RECOMPUTE], ids=["plain", "recompute"])
@pytest.mark.parametrize(
    ("variant", "tied"),
    [("llama", False), ("qwen2", True), ("gemma2", True), ("gpt_oss", False), ("qwen3_moe", False)],
)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, variant: str, tied: bool, strategy: Strategy
) -> None:
    """Of families, too, whose layers differ by number: in windows, or in the routes of their experts."""
    folder = folders.of(variant, tied)
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    found = pool.run(3, train_on_rank, folder, PP3, rollout(folder), options, 1, strategy)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([each[:2] for each in found], metrics, named, atol=1e-6)
    shape = read_shape(folder)
    boxes = {p.name: weight_boxes(shape, Sharding.of(PP3, strategy), p) for p in parameters(shape)}
    counts: list[int] = []
    for rank, (_, held, _) in enumerate(found):
        assert {name: box for name, (box, *_) in held.items()} == {
            name: own[rank] for name, own in boxes.items() if rank in own
        }
        counts.append(len({name.split(".")[2] for name in held if name.startswith("model.layers.")}))
    assert tuple(counts) == stage_sizes(4, 3) == (1, 2, 1)


def test_updates_equal_torch_adamw(pool: Pool, folders: Folders) -> None:
    """Four updates with clipping, whose norm is over all stages."""
    folder = folders.of("llama", True)
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    arguments = folder, PP3, rollout(folder), options, 2, replace(RECOMPUTE, zero=1)
    results = pool.run(3, train_on_rank, *arguments)
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)
    assert all(np.isfinite(value).all() for _, found in parts for _, _, value in found.values())
