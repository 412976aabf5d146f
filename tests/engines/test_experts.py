"""Expert parallelism: models whose experts are spread over data-parallel ranks are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.rows import Rows
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    named_in_files,
    read_weights,
    score_node,
    share,
)
from tests.engines.processes import Pool
from tests.engines.test_strategies import train_on_rank, without_gradients
from tests.engines.test_train import PPO, ROWS, compare, reference, response_log_probs, rollout

MESHES = {
    "dp2": Mesh.of((0, 1), dp=2),
    "dp4": Mesh.of((0, 1, 2, 3), dp=4),
    "tp2dp2": Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    "pp2dp2": Mesh.of((0, 1, 2, 3), pp=2, dp=2),
    "pp2tp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "tp2": Mesh.of((0, 1), tp=2),
}
EP2, ZERO = Strategy(ep=2), Strategy(zero=1, ep=2)
WHOLE, WHOLE4 = Strategy(ep=2, whole_experts=True), Strategy(ep=4, whole_experts=True)
RECOMPUTE = Strategy("full", ep=2)


def loaded_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, strategy: Strategy) -> Any:
    return read_weights(make_engine(rank, new_group, folder, mesh, strategy=strategy))


@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("dp4", EP2, "qwen3_moe"),
        ("tp2dp2", EP2, "mixtral"),
        ("tp2dp2", EP2, "gpt_oss"),
        ("tp2dp2", WHOLE4, "gpt_oss"),
        ("pp2tp2", WHOLE, "mixtral"),
    ],
)
def test_a_rank_holds_its_experts(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, family: str
) -> None:
    folder, mesh = folders.of(family, False), MESHES[layout]
    shape, state = read_shape(folder), named_in_files(folder, load_hf(folder).state_dict().items())
    results = pool.run(len(mesh.devices), loaded_on_rank, folder, mesh, strategy)
    for parameter in parameters(shape):
        boxes = weight_boxes(shape, Sharding.of(mesh, strategy), parameter)
        assert {rank for rank, found in enumerate(results) if parameter.name in found} == boxes.keys()
        for rank, box in boxes.items():
            assert results[rank][parameter.name][0] == box
            expected = state[parameter.name][tuple(slice(a, b) for a, b in box)]
            assert torch.equal(torch.from_numpy(results[rank][parameter.name][1]), expected)


def scored_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], strategy: Strategy
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, strategy=strategy)
    call = make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 2, strategy=strategy)
    inputs = {name: data[name].slice(*share(mesh, rank, ROWS)) for name in ("tokens", "mask")}
    found = engine.run(call, inputs).outputs
    return share(mesh, rank, ROWS), found["logprobs"].values.numpy() if found else None


@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("dp2", EP2), ("dp4", EP2), ("tp2dp2", EP2), ("pp2dp2", EP2), ("tp2dp2", WHOLE4), ("pp2tp2", WHOLE)],
)
def test_log_probs_equal_transformers(pool: Pool, folders: Folders, layout: str, strategy: Strategy) -> None:
    """Replicas have unequal rows, and so would pass unequal numbers of micro-batches."""
    folder, mesh = folders.of("qwen3_moe", False), MESHES[layout]
    data, model = rollout(folder), load_hf(folder)
    results = pool.run(len(mesh.devices), scored_on_rank, folder, mesh, data, strategy)
    for (start, stop), found in results:
        if found is None:
            continue
        with torch.no_grad():
            parts = [
                response_log_probs(model, data["tokens"].slice(r, r + 1).values, int(length), 0.8)[0]
                for r, length in enumerate(data["mask"].row_lengths.tolist())
                if start <= r < stop
            ]
        # float32 against float32 in another order of summation
        torch.testing.assert_close(torch.from_numpy(found), torch.cat(parts), atol=1e-5, rtol=0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("dp2", EP2, "mixtral"),
        ("dp4", EP2, "qwen3_moe"),
        ("dp4", Strategy(ep=4), "qwen3_moe probabilities"),
        ("tp2dp2", RECOMPUTE, "qwen3_moe"),
        ("pp2dp2", EP2, "qwen3_moe probabilities"),
        ("pp2dp2", RECOMPUTE, "mixtral"),
        ("dp2", EP2, "gpt_oss"),
        ("tp2dp2", RECOMPUTE, "gpt_oss"),
        ("tp2dp2", WHOLE4, "qwen3_moe"),
        ("tp2dp2", WHOLE, "gpt_oss"),
        ("pp2tp2", WHOLE, "mixtral"),
        ("tp2", replace(WHOLE, recompute="full"), "qwen3_moe probabilities"),
    ],
)
def test_gradients_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, family: str
) -> None:
    folder, mesh = folders.of(family, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, 1, strategy)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)
    gate = next(name for name in named if name.endswith(("gate.weight", "router.weight")))
    assert named[gate][0].abs().max() > 1e-3, "the router learns"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("dp2", EP2, "qwen3_moe"),
        ("dp4", ZERO, "qwen3_moe"),
        ("tp2dp2", ZERO, "qwen3_moe"),
        ("tp2dp2", ZERO, "gpt_oss"),
        ("tp2dp2", WHOLE4, "gpt_oss"),
        ("tp2dp2", replace(WHOLE, zero=1), "qwen3_moe"),
    ],
)
def test_updates_equal_torch_adamw(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, family: str
) -> None:
    """Four updates with clipping, by a norm that counts each expert once, and weight decay. With ZeRO-1 only
    weights are compared: no rank has whole gradients."""
    folder, mesh = folders.of(family, False), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, rollout(folder), options, 2, strategy)
    assert metrics["grad_norm"] > 0.7
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)


def test_bf16_trains_as_without_expert_parallelism(pool: Pool, folders: Folders) -> None:
    """Each expert sees the same tokens in the same order but for where they come from: what differs is the
    order in which two numbers are added."""
    folder, mesh = folders.of("qwen3_moe", False), MESHES["dp2"]
    options = ADAM | PPO | {"aggregate": "token_mean"}
    apart, whole = (
        pool.run(2, train_on_rank, folder, mesh, rollout(folder), options, 1, strategy, "bf16")
        for strategy in (EP2, PLAIN)
    )
    for (_, mine, _), (_, theirs, _) in zip(apart, whole):
        for name, (box, _, weight) in mine.items():
            assert box == theirs[name][0]
            torch.testing.assert_close(
                torch.from_numpy(weight), torch.from_numpy(theirs[name][2]), atol=2e-2, rtol=1e-2
            )
