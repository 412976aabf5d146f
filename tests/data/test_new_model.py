from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from hflow.diagnostics import HflowError
from hflow.plan.file_tensors import file_tensors
from hflow.plan.parameters import num_parameters
from hflow.plan.read_shape import read_shape
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.tools.new_model import new_model

CLASSES = {
    "gemma2": Gemma2ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "phi3": Phi3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_and_the_planner_agree_on_the_model(tmp_path: Path, family: str, tied: bool) -> None:
    size = new_model(tmp_path, family, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is CLASSES[family]
    shape = read_shape(str(tmp_path))
    assert size == num_parameters(shape) == sum(p.numel() for p in model.parameters())
    state = model.state_dict()
    assert {t.name: t.shape for t in file_tensors(shape)} == {
        name: tuple(state[name].shape) for name in state if not (tied and name == "lm_head.weight")
    }
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert model.generation_config.eos_token_id == load_tokenizer(tmp_path).eos_id


@pytest.mark.parametrize("family", CLASSES)
def test_a_scalar_head_is_that_of_a_sequence_classifier(tmp_path: Path, family: str) -> None:
    size = new_model(tmp_path, family, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, head="scalar")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(model).__name__.lower() == f"{family.replace('_', '')}forsequenceclassification"
    assert model.config.num_labels == 1
    shape = read_shape(str(tmp_path)).with_head("scalar")
    assert size == num_parameters(shape) == sum(p.numel() for p in model.parameters())
    assert {t.name: t.shape for t in file_tensors(shape)} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    untied = read_shape(str(tmp_path))
    assert num_parameters(untied) - num_parameters(shape) == (shape.vocab - 1) * 32
    assert replace(untied, tied=True).with_head("scalar") == shape
    assert shape.with_head("scalar").outputs == 1 and untied.outputs == shape.vocab


def test_weights_are_drawn_with_deviation_one_fiftieth(tmp_path: Path) -> None:
    new_model(tmp_path, "qwen2", layers=1, hidden=128, heads=4)
    state = load_file(tmp_path / "model.safetensors")
    drawn = state["model.layers.0.mlp.gate_proj.weight"]  # 65,536 values: the estimate is good to 1 %
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(drawn.mean().item()) < 0.0005
    assert torch.equal(state["model.norm.weight"], torch.ones(128))
    assert not state["model.layers.0.self_attn.q_proj.bias"].any()


def test_the_seed_decides_the_weights_and_leaves_no_trace(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        new_model(tmp_path / name, layers=1, hidden=16, heads=2, seed=seed)
    assert torch.equal(torch.rand(3), expected), "the caller's random numbers are its own"
    first, again, other = (load_file(tmp_path / n / "model.safetensors") for n in "abc")
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("alphabet", ["01", "0123456789+= ", "abcdefghijklmnopqrstuvwxyz"])
def test_vocabulary_divides_for_tensor_parallelism(tmp_path: Path, alphabet: str) -> None:
    new_model(tmp_path, layers=1, hidden=16, heads=2, alphabet=alphabet)
    shape, tokenizer = read_shape(str(tmp_path)), load_tokenizer(tmp_path)
    assert shape.vocab == len(tokenizer.fast) and shape.vocab % 16 == 0
    assert tokenizer.decode(tokenizer.encode([alphabet])) == [alphabet]


def test_a_full_folder_is_left_alone_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(HflowError, match="HF406.*not empty"):
        new_model(tmp_path, layers=1, hidden=16, heads=2)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]
    new_model(tmp_path, layers=1, hidden=16, heads=2, force=True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["file", "file/model", "file/models/tiny"])
@pytest.mark.parametrize("force", [False, True])
def test_a_file_in_the_way_is_refused(tmp_path: Path, path: str, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HflowError, match=f"HF406.*{path}`: the folder cannot be made"):
        new_model(tmp_path / path, layers=1, hidden=16, heads=2, force=force)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 30, "heads": 4}, "30 is not an even multiple of 4"),
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3"),
        ({"layers": 0}, "at least 1"),
        ({"family": "gpt2"}, "unknown family `gpt2`"),
        ({"head": "reward"}, "unknown head `reward`"),
        ({"head": "scalar", "tied": True}, "cannot be tied"),
        ({"alphabet": ""}, "HF406.*the alphabet is empty"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(HflowError, match=message):
        new_model(tmp_path / "model", **sizes)
    assert not (tmp_path / "model").exists()
