"""ZeRO-1 and recompute: the same training as plain PyTorch's, in less memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from hflow.cost.resident_memory import optimizer_bytes
from hflow.cost.working_memory import working_bytes
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.rows import Rows
from tests.engines.memory import peak_bytes, torch_operations
from tests.engines.models import ADAM, Folders, make_call, make_engine, read_training, share, train_node
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO, ROWS, compare, reference, rollout

ZERO, RECOMPUTE, BOTH = Strategy(zero=1), Strategy("full"), Strategy("full", 1)
PADDING = 128  # elements: Megatron rounds the parts of a buffer up


def train_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    options: dict[str, Any],
    updates: int,
    strategy: Strategy,
    dtype: str = "f32",
) -> Any:
    """Metrics and (box, last gradient, weight) by HF name; bytes of the optimizer's state."""
    engine = make_engine(rank, new_group, folder, mesh, options, dtype, strategy=strategy)
    node = train_node(ROWS, ROWS // updates, options, epochs=updates)
    call = make_call(engine, rank, node, ROWS, 2, strategy=strategy)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    metrics = dict(engine.run(call, inputs).metrics)
    assert engine.adam
    state = [tensor.untyped_storage() for tensor in engine.adam.state()]
    return metrics, read_training(engine), sum({s.data_ptr(): s.nbytes() for s in state}.values())


@pytest.mark.parametrize(
    ("layout", "variant", "tied"),
    [
        ("one", "qwen2", False),
        ("tp2", "qwen2", True),
        ("pp2dp2", "qwen2", True),
        ("tp2", "qwen3 windows", False),
        ("tp2", "gemma2", True),
    ],
)
def test_gradients_with_recompute_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, variant: str, tied: bool
) -> None:
    folder, mesh = folders.of(variant, tied), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    metrics, named = reference(folder, rollout(folder), options, 1, 1)
    arguments = folder, mesh, rollout(folder), options, 1, RECOMPUTE
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    # float32 gradients of size up to about 1; their rounding is about 1e-7
    compare([found[:2] for found in results], metrics, named, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variant", "tied", "strategy"),
    [
        ("dp2", "llama", False, ZERO),
        ("tp2dp2", "llama", True, BOTH),
        ("pp2dp2", "llama", False, ZERO),
        ("pp2dp2", "llama", True, BOTH),
        ("tp2dp2", "qwen3", False, ZERO),  # norms of queries and keys are summed over tp, then split over dp
    ],
)
def test_updates_with_zero_equal_torch_adamw(
    pool: Pool, folders: Folders, layout: str, variant: str, tied: bool, strategy: Strategy
) -> None:
    """Four updates with clipping and weight decay. Only weights are compared: no rank has whole gradients."""
    folder, mesh = folders.of(variant, tied), MESHES[layout]
    options = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.7, "weight_decay": 0.5}
    metrics, named = reference(folder, rollout(folder), options, 2, 2)
    arguments = folder, mesh, rollout(folder), options, 2, strategy
    results = pool.run(len(mesh.devices), train_on_rank, *arguments)
    assert metrics["grad_norm"] > 0.7
    weights = {name: (weight, weight) for name, (_, weight) in named.items()}
    parts = [(reported, without_gradients(found)) for reported, found, _ in results]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(parts, metrics, weights, atol=1e-5)


def without_gradients(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (box, weight, weight) for name, (box, _, weight) in found.items()}


@pytest.mark.slow
def test_bf16_weights_with_zero_are_those_without(pool: Pool, folders: Folders) -> None:
    """Of two ranks, either reduction adds the same two numbers: not one bit differs after four updates."""
    folder, mesh = folders.of("qwen2", False), MESHES["tp2dp2"]
    options = ADAM | PPO | {"aggregate": "token_mean"}
    with_zero, without = (
        pool.run(4, train_on_rank, folder, mesh, rollout(folder), options, 2, strategy, "bf16")
        for strategy in (ZERO, PLAIN)
    )
    for (_, mine, _), (_, theirs, _) in zip(with_zero, without):
        assert all((mine[name][2] == theirs[name][2]).all() for name in theirs)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["dp2", "tp2dp2", "pp2dp2"])
def test_a_rank_keeps_its_part_of_the_state(pool: Pool, folders: Folders, layout: str, dtype: str) -> None:
    """As many bytes as the planner counts, up to Megatron's padding; together, every element once."""
    folder, mesh = folders.of("qwen2", False), MESHES[layout]
    arguments = folder, mesh, rollout(folder), ADAM | PPO | {"aggregate": "token_mean"}, 1, ZERO, dtype
    sizes = [size for _, _, size in pool.run(len(mesh.devices), train_on_rank, *arguments)]
    per_element, shape = (8 if dtype == "f32" else 12), read_shape(folder)
    planned = optimizer_bytes(shape, dtype, mesh, ZERO)
    assert planned <= max(sizes) <= planned + per_element * PADDING
    whole = optimizer_bytes(shape, dtype, mesh, PLAIN)
    replicas = [sum(sizes[d] for d in ranks) for ranks in mesh.groups("dp")]
    assert max(replicas) == whole


def peak_on_rank(
    rank: int, new_group: NewGroup, folder: str, data: dict[str, Rows], strategy: Strategy, kernels: bool
) -> int:
    """Bytes that torch's allocator holds at most during a training, beside those it began with."""
    with contextlib.nullcontext() if kernels else torch_operations():
        return _peak(rank, new_group, folder, data, strategy)


def _peak(rank: int, new_group: NewGroup, folder: str, data: dict[str, Rows], strategy: Strategy) -> int:
    engine = make_engine(rank, new_group, folder, MESHES["one"], ADAM)
    call = make_call(engine, rank, train_node(ROWS, ROWS, PPO), ROWS, ROWS, strategy=strategy)
    engine.run(call, data)
    return peak_bytes(lambda: engine.run(call, data))


def longest_rows() -> dict[str, Rows]:
    """Rows of the greatest length, of which no two share a prompt."""
    tokens = torch.randint(3, 25, (ROWS * 13,), generator=torch.Generator().manual_seed(2))
    responses, numbers = torch.full((ROWS,), 6), torch.zeros(ROWS * 6)
    per_token = {name: Rows(numbers, responses) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    return per_token | {"tokens": Rows(tokens, responses + 7), "mask": Rows(numbers == 0, responses)}


def test_recompute_saves_the_activations_that_the_planner_counts(pool: Pool, folders: Folders) -> None:
    folder, mesh = folders.of("qwen2", False), MESHES["one"]
    kept, recomputed, by_kernels = (
        pool.run(1, peak_on_rank, folder, longest_rows(), strategy, kernels)[0]
        for strategy, kernels in ((PLAIN, False), (RECOMPUTE, False), (PLAIN, True))
    )
    work = Workload(ROWS, 7, 6, optimizer_steps=1, rows_per_update=ROWS)
    planned = [
        working_bytes("train", read_shape(folder), "f32", work, mesh, ROWS, strategy)
        for strategy in (PLAIN, RECOMPUTE)
    ]
    assert recomputed < kept / 2
    assert [kept, recomputed] == pytest.approx(planned, rel=0.08)  # of 13 tokens the last is no input
    assert 0.85 * kept < by_kernels <= kept  # they make the gradients of an MLP without its activation
