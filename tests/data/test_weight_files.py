"""The weights of a folder are all those of its model, as numbers, and no others."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hflow.diagnostics import HflowError
from hflow.graph.ir import Head, Model
from hflow.plan.parameters import parameters
from hflow.plan.read_shape import read_shape
from hflow.runtime.tools.new_model import new_model
from hflow.runtime.weight_files import INDEX, SINGLE, StoredTensor, stored_tensors

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    new_model(folder, family="llama", layers=2, hidden=16, heads=2, ffn=16, alphabet="0123456789+-= ")
    return folder


@pytest.fixture
def folder(origin: Path, tmp_path: Path) -> Path:
    return shutil.copytree(origin, tmp_path / "model")


def stored(folder: Path, head: Head = "lm", frozen: bool = False) -> dict[str, StoredTensor]:
    return stored_tensors(
        Model("actor", str(folder), head, frozen, "f32"), read_shape(str(folder), head=head)
    )


def refusal(folder: Path, head: Head = "lm", frozen: bool = False) -> str:
    with pytest.raises(HflowError) as caught:
        stored(folder, head, frozen)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF406" and str(folder) in diagnostic.message
    return f"{diagnostic.message} {diagnostic.help}"


def rewrite(folder: Path, change: Callable[[Tensors], Mapping[str, Tensor | None]]) -> None:
    """Other tensors, or with None none of that name."""
    tensors = load_file(folder / SINGLE)
    changed = {**tensors, **change(tensors)}
    save_file({name: t.contiguous() for name, t in changed.items() if t is not None}, folder / SINGLE)


def reconfigure(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def shard(folder: Path, change: Callable[[dict[str, str]], Any] = dict) -> None:
    """The weights in two files, and `change` made to the index's map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    halves = ({n: t for n, t in tensors.items() if ("layers.1" in n) == second} for second in (False, True))
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves):
        save_file(half, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(half, f"part-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": change(weight_map)}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_float_are_read(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: {name: tensor.to(dtype) for name, tensor in t.items()})
    assert stored(folder).keys() == {p.name for p in parameters(read_shape(str(folder)))}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.int32, "I32"),
        (torch.int8, "I8"),
        (torch.bool, "BOOL"),
        (torch.uint8, "U8"),
    ],
)
def test_weights_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype, name: str) -> None:
    rewrite(folder, lambda t: {UP: t[UP].to(dtype)})
    assert f"tensor `{UP}` is {name}; weights are one of F64, F32, F16, BF16" in refusal(folder)


def test_a_tensor_that_the_model_does_not_read_is_refused(folder: Path) -> None:
    rewrite(
        folder,
        lambda t: {f"{UP}_scale_inv": torch.ones(1), "model.layers.0.self_attn.q_proj.bias": torch.ones(16)},
    )
    message = refusal(folder)
    assert "does not read tensor `model.layers.0.self_attn.q_proj.bias` and 1 more" in message


def test_fewer_layers_than_the_file_has_are_refused(folder: Path) -> None:
    reconfigure(folder, num_hidden_layers=1, layer_types=None)
    message = refusal(folder)
    assert "does not read tensor `model.layers.1.input_layernorm.weight` and 8 more" in message
    assert "config.json says 1 layers, the file has 2" in message


@pytest.mark.parametrize(
    ("head", "extra"),
    [
        ("lm", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("lm", "model.rotary_emb.inv_freq"),
        ("lm", "score.weight"),
        ("lm", "v_head.summary.weight"),
        ("scalar", "score.weight"),  # and lm_head.weight, of the model that a critic began as
    ],
)
def test_what_transformers_leaves_beside_the_weights_is_passed_over(
    folder: Path, head: Head, extra: str
) -> None:
    rewrite(folder, lambda _: {extra: torch.ones(1, 16)})
    assert extra in stored(folder, head)


def test_a_value_head_of_another_library_is_no_head(folder: Path) -> None:
    """A critic would begin with zeros, where the folder has a head that was trained."""
    rewrite(folder, lambda _: {"v_head.summary.weight": torch.ones(1, 16)})
    assert "does not read tensor `v_head.summary.weight`" in refusal(folder, "scalar")


def test_a_tied_model_may_have_its_output_matrix_in_the_file(folder: Path) -> None:
    reconfigure(folder, tie_word_embeddings=True)
    assert "lm_head.weight" in stored(folder)


def test_a_folder_in_parts_holds_the_same(folder: Path, origin: Path) -> None:
    shard(folder)
    found, expected = stored(folder), stored(origin)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: {**m, UP: "/etc/passwd"}, f"tensor `{UP}` is '/etc/passwd', outside the folder"),
        (lambda m: {**m, UP: "../model.safetensors"}, "outside the folder"),
        (lambda m: {**m, UP: "a/../../model.safetensors"}, "outside the folder"),
        (lambda m: {**m, UP: "part\0"}, "outside the folder"),
        (lambda m: {**m, UP: 3}, f"the file of tensor `{UP}` is 3, no name of a file"),
        (lambda m: {**m, UP: ""}, "no name of a file"),
        (lambda m: {**m, UP: "part-2.safetensors"}, "there is no file `part-2.safetensors`"),
        (lambda m: {**m, UP: "part-0.safetensors"}, f"tensor `{UP}` is here; {INDEX} has it in `part-0"),
        (lambda m: {k: v for k, v in m.items() if k != UP}, f"tensor `{UP}` is here; {INDEX} has it nowhere"),
        (lambda m: {**m, "more": "part-0.safetensors"}, f"no tensor `more`, which {INDEX} promises"),
        (list, "there is no object `weight_map`"),
    ],
)  # fmt: skip
def test_an_index_that_is_not_that_of_its_files_is_refused(
    folder: Path, change: Callable[[dict[str, str]], Any], problem: str
) -> None:
    shard(folder, change)
    assert problem in refusal(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    shard(folder)
    tensors = load_file(folder / "part-1.safetensors")
    save_file({**tensors, EMBEDDING: torch.zeros(32, 16)}, folder / "part-1.safetensors")
    assert f"tensor `{EMBEDDING}` is here; {INDEX} has it in `part-0.safetensors`" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"weight_map": {}, "weight_map": {}}', "duplicate key 'weight_map'"),
        ('{"weight_map": {"\\ud800": "a"}}', "lone surrogate"),
        ("[]", "no JSON object"),
    ],
    ids=["deep", "duplicate", "surrogate", "list"],
)
def test_an_index_that_is_no_plain_json_is_refused(folder: Path, text: str, problem: str) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(text)
    assert problem in refusal(folder)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_device_is_refused_and_not_waited_for(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    (folder / SINGLE).unlink()
    make(folder / name)
    assert f"`{name}` is no regular file" in refusal(folder)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (b"", None),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', 10**10),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}', None),
        (b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,16]}}', None),
        (b"[" * 100_000, None),
    ],
)
def test_a_damaged_head_is_refused(folder: Path, head: bytes, size: int | None) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(head) if size is None else size) + head + bytes(16))
    assert SINGLE in refusal(folder)
