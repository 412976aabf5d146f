"""Experts of published gpt-oss folders, which have 4 bits, against transformers' unpacking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hflow.diagnostics import HflowError
from hflow.graph.ir import Model
from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.runtime.mxfp4 import unpacked
from hflow.runtime.rows import from_lists
from hflow.runtime.weight_files import stored_tensors
from tests.engines.models import (
    Folders,
    generate_node,
    load_hf,
    make_engine,
    named_in_files,
    read_weights,
    some_prompts,
)
from tests.engines.processes import Pool
from tests.engines.test_hf import write_on_rank
from tests.engines.test_model import MESHES, logits_on_rank
from tests.engines.transformers.test_engine import CLOSE, NEW, PROMPTS, both, built, call

MATRICES = ("gate_up_proj", "down_proj")


def packed(source: str, target: Path) -> dict[str, torch.Tensor]:
    """A folder with random 4-bit experts in the place of those of `source`; and these, as transformers
    unpacks them, by the names of its parameters."""
    shutil.copytree(source, target)
    tensors, found = load_file(target / "model.safetensors"), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        experts, columns, rows = tensors.pop(name).shape
        sizes = experts, rows, columns // 32
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, sizes, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    scales_apart = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
    parts = {"model-1.safetensors": tensors, "model-2.safetensors": scales_apart}
    (target / "model.safetensors").unlink()
    for file, part in parts.items():
        save_file(part, target / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(
        target, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return found


def change_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_all_numbers_and_scales_are_those_of_transformers() -> None:
    """Scales within those that float32 has for every number."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for first in range(2, 242, 16):
        scales = torch.arange(first, first + 16, dtype=torch.uint8).view(1, 1, 16)
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0, :, 0]
        assert torch.equal(unpacked(blocks, scales)[0, 0], expected)
    block = torch.tensor([[[0x10, *[0] * 14, 0xF7]]], dtype=torch.uint8)
    found = unpacked(block, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0].tolist() == [0.0, 1.0, *[0.0] * 28, 12.0, -12.0]


def read_on_rank(rank: int, new_group: Any, folder: str, mesh: Mesh, dtype: str) -> Any:
    return read_weights(make_engine(rank, new_group, folder, mesh, dtype=dtype))


@pytest.mark.parametrize(("layout", "dtype"), [("one", "f32"), ("tp2", "bf16")])
def test_weights_are_what_transformers_unpacks(
    pool: Pool, folders: Folders, tmp_path: Path, layout: str, dtype: str
) -> None:
    """In bf16, too: all numbers fit. Over tp a block of 32 columns lies on two ranks."""
    mesh = MESHES[layout]
    expected = packed(folders.of("gpt_oss", False), tmp_path / "packed")
    named = named_in_files(str(tmp_path / "packed"), expected.items())
    for found in pool.run(len(mesh.devices), read_on_rank, str(tmp_path / "packed"), mesh, dtype):
        for name, tensor in named.items():
            box, values = found[name]
            assert torch.equal(torch.from_numpy(values), tensor[tuple(slice(*span) for span in box)])


def test_logits_and_exports_equal_transformers(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    """The export, here of halved weights, is one without 4 bits."""
    source, target = tmp_path / "packed", tmp_path / "plain"
    matrices = packed(folders.of("gpt_oss", False), source)
    tokens = torch.arange(3, 23)[None]
    model = load_hf(folders.of("gpt_oss", False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(matrices.get(name, parameter))
        expected = model(tokens).logits
        (found,) = pool.run(1, logits_on_rank, str(source), MESHES["one"], tokens)
        torch.testing.assert_close(torch.from_numpy(found), expected[:, :-1], atol=1e-5, rtol=0)
        pool.run(1, write_on_rank, str(source), str(target), 2**30)
        written = load_file(target / "model.safetensors")
        for name, parameter in model.named_parameters():
            assert torch.equal(written.pop(name), parameter / 2), name
        assert not written and "quantization_config" not in json.loads((target / "config.json").read_text())
        assert load_hf(str(target))(tokens).logits.isfinite().all()


def test_transformers_engine_generates_the_same(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    """transformers unpacks to bf16, in a model of f32 as well."""
    folder = str(tmp_path / "packed")
    packed(folders.of("gpt_oss", False), tmp_path / "packed")
    inputs = {"prompt": from_lists(some_prompts(PROMPTS))}
    generating = call(generate_node(PROMPTS, 1, NEW, 1.0), PROMPTS)
    mine, theirs = both(pool, built(folder), folder, "lm", generating, inputs)
    assert mine[1:] == theirs[1:]
    torch.testing.assert_close(mine[0]["logprobs"].values, theirs[0]["logprobs"].values, atol=CLOSE, rtol=0)


def test_what_is_missing_or_of_another_format_is_named(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    packed(folders.of("gpt_oss", False), folder)
    model, shape = Model("actor", str(folder), dtype="f32"), read_shape(str(folder))
    tensors = load_file(folder / "model-2.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].float()}, folder / "model-2.safetensors")
    with pytest.raises(HflowError, match=f"HF406.*`{name}` is F32; weights are one of U8"):
        stored_tensors(model, shape)
    save_file({**tensors, name: tensors[name][..., :1].clone()}, folder / "model-2.safetensors")
    with pytest.raises(HflowError, match=f"HF406.*`{name}` has shape"):
        stored_tensors(model, shape)
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(HflowError, match=r"HF303.*`quantization_config`: gptq is not supported"):
        read_shape(str(folder))
