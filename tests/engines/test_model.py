"""A built model against transformers: logits and weights, for every layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hflow.diagnostics import HflowError
from hflow.plan.layout import Box, Mesh
from hflow.plan.packing import TokenBudget
from hflow.plan.parameters import parameters, weight_boxes
from hflow.plan.read_shape import read_shape
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import micro_batches
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences
from tests.engines.models import VARIANTS, Folders, load_hf, make_engine, named_in_files
from tests.engines.processes import Pool

MODELS = [(variant, tied) for variant in VARIANTS for tied in (False, True)]
MESHES = {
    "one": Mesh.of((0,)),
    "tp2": Mesh.of((0, 1), tp=2),
    "pp2": Mesh.of((0, 1), pp=2),
    "dp2": Mesh.of((0, 1), dp=2),
    "tp2pp2": Mesh.of((0, 1, 2, 3), pp=2, tp=2),
    "tp2dp2 regrouped": Mesh.of((0, 2, 1, 3), dp=2, tp=2),
}


def logits_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, tokens: torch.Tensor) -> Any:
    """Logits after every token but the last, ``[rows, seq - 1, vocab]``; None but on the last stage."""
    engine = make_engine(rank, new_group, folder, mesh)
    groups = engine.groups
    rows, length = tokens.shape
    lengths = torch.full((rows,), length)
    sequences = Sequences(tokens, torch.ones_like(lengths), lengths - 1)
    batches = micro_batches(
        sequences, torch.arange(rows), TokenBudget(2 * length, 2 * length), same_shape=True
    )

    def gather(hidden: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = OutputMatrix.of(engine.model).logits(hidden)
        parts = [torch.empty_like(logits) for _ in range(groups.tp.size())]
        dist.all_gather(parts, logits, group=groups.tp)
        return logits.new_zeros(()), torch.cat(parts, -1)

    with torch.no_grad():
        parts = run_schedule(engine.model, groups, batches, gather, forward_only=True)
    order = torch.cat([batch.rows for batch in batches])
    return torch.cat(parts).view(rows, length - 1, -1)[order.argsort()].numpy() if parts else None


@pytest.mark.matrix(24)
@pytest.mark.parametrize("family,tied", MODELS)
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2pp2"])
def test_logits_equal_transformers(
    pool: Pool, folders: Folders, family: str, tied: bool, layout: str
) -> None:
    folder, mesh = folders.of(family, tied), MESHES[layout]
    torch.manual_seed(2)
    tokens = torch.randint(0, 32, (4, 20))
    results = pool.run(len(mesh.devices), logits_on_rank, folder, mesh, tokens)
    with torch.no_grad():
        expected = load_hf(folder)(tokens).logits[:, :-1]
    found = [torch.from_numpy(r) for r in results if r is not None]
    assert len(found) == mesh.tp * mesh.dp
    for logits in found:
        # float32 against float32 in another order of summation; logits reach about 5
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.5


def weights_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> Any:
    """What a rank reads after loading, and again after writing the negative in two parts."""
    weights = make_engine(rank, new_group, folder, mesh).weights
    loaded = {
        name: (weights.box(name), weights.read(name, weights.box(name)).numpy().copy())
        for name in weights.names()
    }
    for name in weights.names():
        for half in halves(weights.box(name)):
            weights.write(name, half, -weights.read(name, half))
    negated = {name: weights.read(name, weights.box(name)).numpy() for name in weights.names()}
    return loaded, negated


def halves(box: Box) -> list[Box]:
    """A matrix cut along its columns, where no head or rank ends; a vector is not cut."""
    *head, (start, stop) = box
    if not head:
        return [box]
    cut = start + (stop - start) // 3 + 1
    return [(*head, (start, cut)), (*head, (cut, stop))]


@pytest.mark.matrix(24)
@pytest.mark.parametrize("family,tied", MODELS)
@pytest.mark.parametrize("layout", list(MESHES))
def test_weights_are_the_boxes_of_the_hf_tensors(
    pool: Pool, folders: Folders, family: str, tied: bool, layout: str
) -> None:
    folder, mesh = folders.of(family, tied), MESHES[layout]
    state = named_in_files(folder, load_hf(folder).state_dict().items())
    results = pool.run(len(mesh.devices), weights_on_rank, folder, mesh)
    shape = read_shape(folder)
    assert {p.name for p in parameters(shape)} == state.keys() - ({"lm_head.weight"} if tied else set())
    for parameter in parameters(shape):
        boxes = weight_boxes(shape, Sharding(mesh), parameter)
        assert {rank for rank, (loaded, _) in enumerate(results) if parameter.name in loaded} == boxes.keys()
        for rank, box in boxes.items():
            loaded, negated = results[rank]
            expected = state[parameter.name][tuple(slice(a, b) for a, b in box)]
            assert loaded[parameter.name][0] == box
            assert torch.equal(torch.from_numpy(loaded[parameter.name][1]), expected)
            assert torch.equal(torch.from_numpy(negated[parameter.name]), -expected)


def partial_on_rank(rank: int, new_group: NewGroup, folder: str, name: str, box: Box) -> Any:
    weights = make_engine(rank, new_group, folder, Mesh.of((0,))).weights
    before = weights.read(name, box).numpy().copy()
    weights.write(name, box, torch.zeros_like(weights.read(name, box)))
    return before, {n: weights.read(n, weights.box(n)).numpy() for n in weights.names()}


@pytest.mark.parametrize(
    "name,box",
    [
        ("model.layers.1.self_attn.q_proj.weight", ((13, 29), (3, 60))),  # in one query group
        ("model.layers.1.self_attn.q_proj.weight", ((0, 64), (3, 60))),  # of both
        ("model.layers.1.self_attn.v_proj.bias", ((5, 14),)),
        ("model.layers.2.mlp.up_proj.weight", ((1, 95), (0, 64))),
        ("model.layers.2.mlp.down_proj.weight", ((0, 64), (7, 33))),
        ("model.embed_tokens.weight", ((8, 16), (0, 64))),
    ],
)
def test_a_box_is_written_and_nothing_else(pool: Pool, folders: Folders, name: str, box: Box) -> None:
    folder = folders.of("qwen2", False)
    expected = load_hf(folder).state_dict()
    where = tuple(slice(a, b) for a, b in box)
    ((before, after),) = pool.run(1, partial_on_rank, folder, name, box)
    assert torch.equal(torch.from_numpy(before), expected[name][where])
    expected[name][where] = 0
    assert {n: torch.from_numpy(v) for n, v in after.items()}.keys() == expected.keys()
    assert all(torch.equal(torch.from_numpy(after[n]), expected[n]) for n in after)


def load_error_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh) -> str:
    try:
        make_engine(rank, new_group, folder, mesh)
    except HflowError as error:
        return str(error)
    return ""


def test_a_tied_model_with_another_output_matrix_is_refused(
    pool: Pool, folders: Folders, tmp_path: Path
) -> None:
    """transformers would untie it, hflow pass it over: what was trained is not what would be run."""
    folder = tmp_path / "model"
    shutil.copytree(folders.of("llama", True), folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, refused in ((embedding.clone(), False), (embedding * 2, True), (embedding[:5].clone(), True)):
        save_file({**tensors, "lm_head.weight": head.contiguous()}, folder / "model.safetensors")
        messages = pool.run(4, load_error_on_rank, str(folder), MESHES["tp2pp2"])
        assert all(("lm_head.weight` differs from `model.embed" in m) == refused for m in messages), messages


def test_a_missing_tensor_is_named(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders.of("llama", False), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    (message,) = pool.run(1, load_error_on_rank, str(folder), MESHES["one"])
    assert "HF406" in message and "model.layers.3.mlp.up_proj.weight" in message
    (folder / "model.safetensors").unlink()
    (message,) = pool.run(1, load_error_on_rank, str(folder), MESHES["one"])
    assert "HF406" in message and "neither model.safetensors" in message


@pytest.mark.parametrize("mesh", [Mesh.of((1, 0), tp=2), Mesh.of((1, 0), pp=2)])
def test_a_mesh_that_torch_would_reorder_is_refused(pool: Pool, folders: Folders, mesh: Mesh) -> None:
    for message in pool.run(2, load_error_on_rank, folders.of("llama", False), mesh):
        assert "HF302" in message and "1,0" in message
