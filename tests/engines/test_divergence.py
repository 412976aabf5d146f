"""Numbers that are not finite are told where they arise: by node, step, and the first bad tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hflow.diagnostics import HflowError
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.protocol import NodeError
from hflow.runtime.rows import from_lists
from tests.engines.models import (
    ADAM,
    Folders,
    generate_node,
    make_call,
    make_engine,
    score_node,
    share,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, ROWS, rollout

BAD = "model.layers.2.mlp.up_proj.weight"  # on the second of two stages


def told_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, op: str, value: float, lr: float
) -> Any:
    """What a node says when one weight, at its last place, holds `value`; the message of this rank."""
    engine = make_engine(rank, new_group, folder, mesh, ADAM if op == "train" else None)
    if BAD in engine.weights.names() and value:
        engine.weights.read(BAD, engine.weights.box(BAD))[-1, -1] = value
    data = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in rollout(folder).items()}
    node = {
        "generate": generate_node(ROWS, 1, 4, 1.0),
        "score": score_node(ROWS, 1.0),
        "train": train_node(ROWS, ROWS, {"lr": lr}),
    }[op]
    if op == "generate":
        data = {"prompt": from_lists(some_prompts(ROWS)).slice(*share(mesh, rank, ROWS))}
    try:
        engine.run(make_call(engine, rank, node, ROWS, 3), data)
    except NodeError as error:
        return error.code, error.node, error.message
    return None


def told(pool: Pool, folder: str, layout: str, op: str, value: float, lr: float = 1e-2) -> list[str]:
    mesh = MESHES[layout]
    found = pool.run(len(mesh.devices), told_on_rank, folder, mesh, op, value, lr)
    node = {"generate": "rollout", "score": "ref", "train": "actor_train"}[op]
    assert {answer[:2] for answer in found} == {("HF405", node)}
    assert all(message.startswith("step 3: ") for *_, message in found)
    return [message for *_, message in found]


@pytest.mark.matrix
@pytest.mark.parametrize(("op", "layout"), [
    ("generate", "one"), ("generate", "tp2"), ("score", "one"), ("score", "tp2"), ("score", "pp2"),
    ("train", "one"), ("train", "dp2"), ("train", "tp2pp2"),
])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_by_all_ranks(
    pool: Pool, folders: Folders, op: str, layout: str, value: float
) -> None:
    (message,) = set(told(pool, folders.of("qwen2", False), layout, op, value))
    assert message.endswith(f"; weight `{BAD}` holds {value}")
    seen = {
        "generate": "before response token 0 of row 0 is",
        "score": "`logprobs` of row ",
        "train": "loss nan",
    }
    assert seen[op] in message


@pytest.mark.parametrize(("op", "layout"), [("generate", "one"), ("score", "pp2"), ("train", "tp2")])
def test_weights_that_are_finite_and_too_large_are_named_too(
    pool: Pool, folders: Folders, op: str, layout: str
) -> None:
    """In float32 3e38 is a number; what a layer makes of it is none."""
    (message,) = set(told(pool, folders.of("llama", True), layout, op, 3e38))
    assert f"; weight `{BAD}` holds numbers up to 3e+38" in message


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2"])
def test_a_learning_rate_that_ruins_the_weights_is_told_by_its_update(
    pool: Pool, folders: Folders, layout: str
) -> None:
    """Not by who reads them next. Adam moves a weight by about the learning rate, here to 1e30 or so."""
    (message,) = set(told(pool, folders.of("qwen2", False), layout, "train", 0.0, lr=1e30))
    assert message.startswith("step 3: after update 3, of learning rate 1e+30; weight `model.embed_tokens")


def load_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, dtype: str) -> Any:
    try:
        make_engine(rank, new_group, folder, mesh, dtype=dtype)
    except HflowError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message
    return None


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "f32"), (float("-inf"), "f32"), (3.4e38, "bf16")]
)
def test_a_file_with_a_weight_that_is_not_finite_is_refused(
    pool: Pool, folders: Folders, tmp_path: Path, value: float, dtype: str
) -> None:
    """By the rank that reads it; 3.4e38 is a float32 number, and more than bf16 has."""
    folder = tmp_path / "model"
    shutil.copytree(folders.of("qwen2", False), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[BAD][95, 7] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    first, second = pool.run(2, load_on_rank, str(folder), MESHES["tp2"], dtype)
    code, message = second
    shown = "inf" if dtype == "bf16" else str(value)
    assert (first, code) == (None, "HF406")
    assert message == f"`{folder / 'model.safetensors'}`: tensor `{BAD}` holds {shown} at [95, 7]"


def test_large_numbers_are_no_fault_of_a_file(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    """Their squares are infinite, they are not."""
    folder = tmp_path / "model"
    shutil.copytree(folders.of("qwen2", False), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[BAD] = torch.full_like(tensors[BAD], 1e30)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert pool.run(1, load_on_rank, str(folder), MESHES["one"], "f32") == [None]
