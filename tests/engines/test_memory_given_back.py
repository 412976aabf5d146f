"""Weights and optimizer states that leave the device: their memory is free, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.engine import MegatronModel
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import Rows
from tests.engines.models import (
    ADAM,
    Folders,
    make_call,
    make_engine,
    read_weights,
    score_node,
    share,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO, ROWS, rollout


def bytes_of(tensors: Any) -> int:
    """What the tensors' storages hold."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def frozen_on_rank(rank: int, new_group: NewGroup, folder: str, data: dict[str, Rows]) -> Any:
    """Scores before the weights leave, after they are back, and after others were written meanwhile; what
    the errors say in between."""
    engine = make_engine(rank, new_group, folder, MESHES["one"], frozen=True)
    parameters = list(engine.model.parameters())
    call = make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 2)
    scores, problems = [score(engine, call, data)], []
    copied = [engine.offload(), engine.offload()]
    assert bytes_of(parameters) == 0
    problems += [refusal(lambda: engine.run(call, data)), refusal(lambda: read_weights(engine))]
    with pytest.raises((RuntimeError, IndexError)):  # torch itself finds nothing to compute with
        engine.model(torch.zeros(1, 2, dtype=torch.int64), None, None)
    copied += [engine.onload(), engine.onload()]
    scores.append(score(engine, call, data))
    copied.append(engine.offload())
    engine.weights.allocate()
    write_halves(engine, folder)
    scores.append(score(engine, call, data))
    copied += [engine.offload(), engine.onload()]
    scores.append(score(engine, call, data))
    assert all(p is q for p, q in zip(parameters, engine.model.parameters(), strict=True))
    return scores, problems, copied, sum(p.nbytes for p in parameters)


def score(engine: MegatronModel, call: Any, data: dict[str, Rows]) -> Any:
    return engine.run(call, data).outputs["logprobs"].values.clone()


def refusal(action: Any) -> str:
    with pytest.raises((NodeError, RuntimeError)) as caught:
        action()
    return str(caught.value)


def write_halves(engine: MegatronModel, folder: str) -> None:
    """Half of what the folder holds, by HF name."""
    from safetensors.torch import load_file

    for name, values in load_file(f"{folder}/model.safetensors").items():
        engine.weights.write(name, engine.weights.box(name), values / 2)


def test_frozen_weights_leave_and_come_back(pool: Pool, folders: Folders) -> None:
    folder = folders.of("qwen2", False)
    ((scores, problems, copied, size),) = pool.run(1, frozen_on_rank, folder, rollout(folder))
    assert problems[0] == "the weights it reads were released or offloaded"
    assert "is not on this device" in problems[1]
    assert torch.equal(scores[1], scores[0])
    assert not torch.equal(scores[2], scores[0]) and torch.equal(scores[3], scores[2])
    # What has not changed since it was copied is dropped; what was written meanwhile is copied first.
    assert copied == [size, 0, size, 0, 0, size, size]


def released_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> Any:
    engine = make_engine(rank, new_group, folder, mesh)
    before = read_weights(engine)
    engine.weights.release()
    empty = bytes_of(engine.model.parameters())
    name = engine.weights.names()[0]
    problem = refusal(lambda: engine.weights.write(name, *before[name]))
    engine.weights.allocate()
    for name, (box, values) in before.items():
        engine.weights.write(name, box, torch.from_numpy(values))
    after = read_weights(engine)
    return empty, problem, all((after[n][1] == values).all() for n, (_, values) in before.items())


@pytest.mark.parametrize("tied", [False, True])
def test_released_weights_are_written_anew(pool: Pool, folders: Folders, tied: bool) -> None:
    for found in pool.run(4, released_on_rank, folders.of("llama", tied), MESHES["tp2pp2"]):
        empty, problem, same = found
        assert empty == 0 and same
        assert "is not on this device" in problem


def trained_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    dtype: str,
    strategy: Strategy,
    offloads: bool,
) -> Any:
    """Weights after three executions, between which the optimizer may be away."""
    engine = make_engine(rank, new_group, folder, mesh, ADAM | PPO, dtype, strategy=strategy)
    node = train_node(ROWS, ROWS, ADAM | PPO | {"aggregate": "token_mean"})
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    assert engine.adam
    moved = []
    for step in range(3):
        if offloads:
            moved += [engine.offload(), engine.offload()]
            model: Any = engine.adam.model  # Megatron's: a list of its own, where torch has a method
            gradients = [buffer.grad_data for buffer in model.buffers]
            assert bytes_of([*engine.adam.state(), *gradients]) == 0
            assert read_weights(engine)
            call = make_call(engine, rank, node, ROWS, 2, step, strategy=strategy)
            assert refusal(lambda: engine.run(call, inputs)) == "its optimizer's state was offloaded"  # noqa: B023
            moved += [engine.onload(), engine.onload()]
        engine.run(make_call(engine, rank, node, ROWS, 2, step, strategy=strategy), inputs)
    state = sum(tensor.nbytes for tensor in engine.adam.state())
    return read_weights(engine), moved, state


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "strategy"), [("one", PLAIN), ("tp2dp2", Strategy("full", 1)), ("pp2dp2", Strategy(zero=1))]
)
def test_an_optimizer_that_was_away_goes_on_as_before(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, dtype: str
) -> None:
    """Not one bit differs from the training whose optimizer stays."""
    folder, mesh = folders.of("qwen2", True), MESHES[layout]
    arguments = folder, mesh, rollout(folder), dtype, strategy
    stayed = pool.run(len(mesh.devices), trained_on_rank, *arguments, False)
    left = pool.run(len(mesh.devices), trained_on_rank, *arguments, True)
    for (mine, moved, state), (theirs, _, _) in zip(left, stayed):
        assert all((mine[name][1] == values).all() for name, (_, values) in theirs.items())
        assert moved == [state, 0, state, 0] * 3


def donated_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    mesh: Mesh,
    data: dict[str, Rows],
    dtype: str,
    strategy: Strategy,
    donates: bool,
) -> Any:
    """Weights after three executions; before each, their memory may have been donated to a copy that is
    larger, and known only where it holds what is trained here."""
    engine = make_engine(rank, new_group, folder, mesh, ADAM | PPO, dtype, strategy=strategy)
    replicas = Mesh.of(mesh.devices, dp=len(mesh.devices))
    copy = make_engine(rank, new_group, folder, replicas, dtype=dtype).weights
    node = train_node(ROWS, ROWS, ADAM | PPO | {"aggregate": "token_mean"})
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    problems: list[str] = []
    for step in range(3):
        call = make_call(engine, rank, node, ROWS, 2, step, strategy=strategy)
        if donates:
            for name in copy.names():
                copy.view(name, copy.box(name)).fill_(torch.nan)
            for name in engine.weights.names():
                box = engine.weights.box(name)
                copy.write(name, box, engine.weights.read(name, box))
            engine.weights.donate()
            assert bytes_of(engine.model.parameters()) == 0
            problems.append(refusal(lambda: engine.run(call, inputs)))  # noqa: B023
            engine.weights.take_back(copy)
        engine.run(call, inputs)
    return read_weights(engine), problems


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "strategy"), [("one", PLAIN), ("tp2dp2", Strategy("full", 1)), ("tp2pp2", PLAIN)]
)
def test_weights_that_lent_their_memory_train_as_before(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, dtype: str
) -> None:
    """Not one bit differs from the training whose weights stay, also of the optimizer that refers to them."""
    folder, mesh = folders.of("qwen2", True), MESHES[layout]
    arguments = folder, mesh, rollout(folder), dtype, strategy
    stayed = pool.run(len(mesh.devices), donated_on_rank, *arguments, False)
    donated = pool.run(len(mesh.devices), donated_on_rank, *arguments, True)
    for (mine, problems), (theirs, _) in zip(donated, stayed):
        assert problems == ["the weights it reads were released or offloaded"] * 3
        assert all((mine[name][1] == values).all() for name, (_, values) in theirs.items())
