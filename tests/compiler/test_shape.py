"""Shapes read from config.json are those that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hflow.compiler.shape import Experts, ModelShape, read_shape
from hflow.diagnostics import HflowError

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 32, "max_position_embeddings": 128, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_config_of_transformers_is_read(family: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim" or family.startswith("qwen3")}
    experts = EXPERTS if family == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(family, **sizes, **experts, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.family == family and shape.tied == tied
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.qk_norm == any("q_norm" in name for name, _ in model.named_parameters())
    assert shape.qkv_bias == any("q_proj.bias" in name for name, _ in model.named_parameters())


def test_experts(tmp_path: Path) -> None:
    """6 experts of 3·64·24 weights in 3 layers, of which each token meets 2."""
    shape = read_shape(written(tmp_path, MOE))
    assert shape.moe == Experts(num_experts=6, top_k=2, ffn=24)
    assert (shape.ffn, shape.mlp_width) == (48, 24)
    assert shape.num_parameters - shape.active_parameters == 3 * (6 - 2) * 3 * 64 * 24
    # transformers 5 writes another name than the published files have
    renamed = {"num_local_experts" if k == "num_experts" else k: v for k, v in MOE.items()}
    assert read_shape(written(tmp_path, renamed)) == shape


def test_a_dense_model_is_active_as_a_whole() -> None:
    shape = ModelShape("llama", 2, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, False)
    assert shape.active_parameters == shape.num_parameters and shape.mlp_width == 96
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 4 * 8 * 2  # k and v, layers, kv heads, head dim, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "families: llama, qwen2, qwen3, qwen3_moe"),
        ({"decoder_sparse_step": 2}, "some layers only"),
        ({"mlp_only_layers": [0]}, "some layers only"),
        ({"attention_bias": True}, "qwen3_moe with biases"),
        ({"num_experts_per_tok": 7}, "7 of 6 experts"),
        ({"num_experts_per_tok": 0}, "top_k is 0"),
        ({"moe_intermediate_size": -1}, "is -"),
        ({"num_experts": None}, "no key 'num_local_experts'"),
        ({"num_experts": 6.5}, "no whole number"),
        ({"num_attention_heads": 6}, "6 heads are no multiple of 4 key-value heads"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size 65 is no multiple of 8 heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotary"),
        ({"rope_scaling": "yarn"}, "rope_scaling is no JSON object"),
        ({"rope_parameters": [1.0]}, "rope_parameters is no JSON object"),
        ({"rms_norm_eps": "small"}, "value of the wrong kind"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HflowError) as caught:
        read_shape(written(tmp_path, {**MOE, **change}))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF303" and message in diagnostic.message


@pytest.mark.parametrize("text", ["[]", '"qwen2"', "3", "null"])
def test_a_config_is_an_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HflowError, match="HF303.*no JSON object"):
        read_shape(str(tmp_path))
