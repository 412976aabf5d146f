"""One forward pass for scoring and the first update: plain PyTorch's gradients, with one pass fewer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hflow.cost.working_memory import kept_forward_bytes
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import Strategy
from hflow.plan.workload import Workload
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.megatron.shared_forward import Trainer
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.rows import Rows
from tests.engines.memory import held_bytes, torch_operations
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    read_training,
    score_node,
    share,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_strategies import longest_rows
from tests.engines.test_train import MESHES, PPO, ROWS, compare, reference, response_log_probs, rollout

PLAIN, RECOMPUTE = Strategy(share_forward=True), Strategy("full", share_forward=True)
OPTIONS: dict[str, Any] = ADAM | PPO | {"aggregate": "sequence_mean"}
MICRO = 4


def calls_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    strategy: Strategy,
    updates: int,
    micro: int = MICRO,
) -> tuple[MegatronModel, EngineCall, EngineCall]:
    """An engine, and the calls of a score node and of a train node that share a forward pass."""
    engine = make_engine(rank, new_group, folder, mesh, OPTIONS, strategy=strategy)
    node = train_node(ROWS, ROWS // updates, OPTIONS)
    scoring = make_call(engine, rank, score_node(ROWS, PPO["temperature"]), ROWS, micro, strategy=strategy)
    training = make_call(engine, rank, node, ROWS, micro, strategy=strategy)
    assert engine.adam
    engine.trainer = Trainer(node, training.plan, engine.adam.model)
    return engine, scoring, training


def trained_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    strategy: Strategy,
    updates: int,
) -> Any:
    """Log-probs of this rank's rows, metrics and (box, last gradient, weight) by HF name, and how often a
    layer passed tokens forward in scoring and in training."""
    engine, scoring, training = calls_on_rank(rank, new_group, folder, mesh, strategy, updates)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    count = [0]
    layer = engine.model.decoder.layers[0]
    layer.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    found = engine.run(scoring, {name: inputs[name] for name in ("tokens", "mask")})
    in_scoring = count[0]
    metrics = dict(engine.run(training, inputs).metrics)
    passes = in_scoring, count[0] - in_scoring
    return found.outputs["logprobs"], (metrics, read_training(engine)), passes


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("one", PLAIN), ("one", RECOMPUTE), ("dp2", PLAIN), ("tp2", replace(PLAIN, sp=True)), ("tp2dp2", PLAIN)],
)
@pytest.mark.parametrize("updates", [1, 2])
def test_gradients_and_log_probs_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, updates: int
) -> None:
    """Ranks of dp2 have uneven rows, which move before they are trained on, and whose log-probs go back."""
    folder, mesh, data = folders.of("qwen2", False), MESHES[layout], rollout(folders.of("qwen2", False))
    metrics, named = reference(folder, data, OPTIONS, updates, 1)
    results = pool.run(len(mesh.devices), trained_on_rank, folder, mesh, data, strategy, updates)
    compare([trained for _, trained, _ in results], metrics, named, atol=1e-6 if updates == 1 else 1e-5)
    model = load_hf(folder)
    for rank, (found, _, _) in enumerate(results):
        for row in range(*share(mesh, rank, ROWS)):
            at = row - share(mesh, rank, ROWS)[0]
            tokens, length = (
                data["tokens"].slice(row, row + 1).values.long(),
                int(data["mask"].row_lengths[row]),
            )
            expected = response_log_probs(model, tokens, length, PPO["temperature"])[0]
            torch.testing.assert_close(
                found.slice(at, at + 1).values, expected.detach(), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize(("updates", "expected"), [(1, (4, 0)), (2, (4, 2))])
def test_the_first_update_passes_nothing_forward(
    pool: Pool, folders: Folders, updates: int, expected: tuple[int, int]
) -> None:
    """14 rows in micro-batches of at most 4 of the longest: of all, or of two minibatches of 7, of which the
    second has a forward pass of its own."""
    folder, mesh = folders.of("qwen2", False), MESHES["one"]
    data = rollout(folder) | longest_rows()
    ((_, _, passes),) = pool.run(1, trained_on_rank, folder, mesh, data, PLAIN, updates)
    assert passes == expected


def unshared_on_rank(rank: int, new_group: NewGroup, folder: str, data: dict[str, Rows]) -> None:
    engine, _, training = calls_on_rank(rank, new_group, folder, MESHES["one"], PLAIN, 1)
    engine.run(training, data)


def test_a_training_that_finds_no_pass_does_not_make_its_own(pool: Pool, folders: Folders) -> None:
    folder = folders.of("qwen2", False)
    with pytest.raises(AssertionError, match="nothing is shared"):
        pool.run(1, unshared_on_rank, folder, rollout(folder))


def kept_on_rank(rank: int, new_group: NewGroup, folder: str, strategy: Strategy) -> int:
    mesh = MESHES["one"]
    engine, scoring, _ = calls_on_rank(rank, new_group, folder, mesh, strategy, 1)
    rows = longest_rows()
    inputs = {name: rows[name] for name in ("tokens", "mask")}
    with torch_operations():
        return held_bytes(lambda: engine.run(scoring, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [PLAIN, RECOMPUTE])
def test_as_much_is_kept_as_the_planner_counts(pool: Pool, folders: Folders, strategy: Strategy) -> None:
    folder, mesh = folders.of("qwen2", False), MESHES["one"]
    (kept,) = pool.run(1, kept_on_rank, folder, strategy)
    work = Workload(ROWS, 7, 6, optimizer_steps=1, rows_per_update=ROWS)
    planned = kept_forward_bytes(read_shape(folder), "f32", work, mesh, strategy)
    assert kept == pytest.approx(planned, rel=0.1)  # of 13 tokens the last is no input
