"""Shapes read from config.json are those that transformers builds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import HflowError
from hflow.plan.model_config import MAX_BYTES, MAX_LAYERS
from hflow.plan.model_shape import Experts, ModelShape
from hflow.plan.parameters import active_parameters, num_parameters
from hflow.plan.read_shape import read_shape

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
    assert num_parameters(shape) == sum(p.numel() for p in model.parameters())
    assert shape.qk_norm == any("q_norm" in name for name, _ in model.named_parameters())
    assert shape.qkv_bias == any("q_proj.bias" in name for name, _ in model.named_parameters())


def test_experts(tmp_path: Path) -> None:
    """6 experts of 3·64·24 weights in 3 layers, of which each token meets 2."""
    shape = read_shape(written(tmp_path, MOE))
    assert shape.moe == Experts(num_experts=6, top_k=2, ffn=24)
    assert (shape.ffn, shape.mlp_width) == (48, 24)
    assert num_parameters(shape) - active_parameters(shape) == 3 * (6 - 2) * 3 * 64 * 24
    # transformers 5 writes another name than the published files have
    renamed = {"num_local_experts" if k == "num_experts" else k: v for k, v in MOE.items()}
    assert read_shape(written(tmp_path, renamed)) == shape


def test_a_dense_model_is_active_as_a_whole() -> None:
    shape = ModelShape("llama", 2, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, False)
    assert active_parameters(shape) == num_parameters(shape) and shape.mlp_width == 96
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 4 * 8 * 2  # k and v, layers, kv heads, head dim, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "llama, qwen2 run, qwen3, qwen3_moe can only be planned"),
        ({"decoder_sparse_step": 2}, "some layers only"),
        ({"mlp_only_layers": [0]}, "some layers only"),
        ({"attention_bias": True}, "qwen3_moe with biases"),
        ({"num_experts_per_tok": 7}, "7 of 6 experts"),
        ({"num_experts_per_tok": 0}, "`num_experts_per_tok` is 0, not between 1"),
        ({"moe_intermediate_size": -1}, "is -"),
        ({"num_experts": None}, "no key 'num_local_experts'"),
        ({"num_experts": 6.5}, "no whole number"),
        ({"num_attention_heads": 6}, "6 heads are no multiple of 4 key-value heads"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size 65 is no multiple of 8 heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotary"),
        ({"rope_scaling": "yarn"}, "rope_scaling is no JSON object"),
        ({"rope_parameters": [1.0]}, "rope_parameters is no JSON object"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` is 'false', neither true nor false"),
        ({"attention_bias": "false"}, "`attention_bias` is 'false', neither true nor false"),
        ({"use_sliding_window": 0}, "`use_sliding_window` is 0, neither true nor false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"partial_rotary_factor": 0.5}, "in a part of each head"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "in a part of each head"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn"}}, "scaled rotary"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, not between 1 and 10000"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` is True, no whole number"),
        ({"num_hidden_layers": 2.0}, "`num_hidden_layers` is 2.0, no whole number"),
        ({"num_hidden_layers": None}, "no key 'num_hidden_layers'"),
        ({"num_experts": 10**6}, "`num_experts` is 1000000, not between 1 and 333333"),
        ({"vocab_size": 0}, "`vocab_size` is 0, not between 1"),
        ({"vocab_size": 10**4000}, "`vocab_size` is an integer of 13288 bits, not between 1"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0, not between 1"),
        ({"head_dim": 0}, "`head_dim` is 0, not between 1"),
        ({"head_dim": 15}, "heads are 15 wide; rotary positions need an even width"),
        ({"rope_theta": -1.0}, "`rope_theta` is -1.0, no finite number above 0"),
        ({"rope_theta": 0}, "`rope_theta` is 0, no finite number above 0"),
        ({"rope_theta": 10**4000}, "no finite number above 0"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "`rope_theta` is nan, no finite number above 0"),
        ({"rms_norm_eps": "1e-6"}, "`rms_norm_eps` is '1e-6', no number"),
        ({"rms_norm_eps": float("inf")}, "`rms_norm_eps` is inf, no finite number above 0"),
        ({"eos_token_id": 32}, "`eos_token_id` 32 is outside the vocabulary of 32 tokens"),
        ({"eos_token_id": [3, -1]}, "`eos_token_id` -1 is outside the vocabulary"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` is '</s>', no token and no list of tokens"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` is 'small', no number"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HflowError) as caught:
        read_shape(written(tmp_path, {**MOE, **change}))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF303" and message in diagnostic.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"model_type": "qwen2", "model_type": "llama"}', "duplicate key 'model_type'"),
        ('{"model_type": "\\ud800"}', "lone surrogate"),
        ('{"vocab_size": ' + "9" * 10_000 + "}", "bad JSON"),
        ("{" + " " * MAX_BYTES + "}", f"larger than {MAX_BYTES} bytes"),
        ("", "bad JSON"),
    ],
    ids=["deep", "duplicate", "surrogate", "digits", "large", "empty"],
)
def test_what_is_no_readable_json_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HflowError) as caught:
        read_shape(str(tmp_path))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF303" and message in diagnostic.message


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    make[kind](file)
    with pytest.raises(HflowError, match=f"HF303.*it is a {kind}, no regular file"):
        read_shape(str(tmp_path))


def test_null_is_no_value(tmp_path: Path) -> None:
    """transformers writes null for what it does not know."""
    absent = ("tie_word_embeddings", "head_dim", "rope_theta", "rope_scaling", "eos_token_id", "layer_types")
    plain = {k: v for k, v in MOE.items() if k not in absent}
    expected = read_shape(written(tmp_path, plain))
    assert read_shape(written(tmp_path, plain | dict.fromkeys(absent))) == expected


def test_the_largest_model_is_compiled_in_little_time(tmp_path: Path) -> None:
    """Seconds on any machine, where a thousand million layers took half a minute of one."""
    sizes = {
        **SIZES,
        "num_hidden_layers": MAX_LAYERS,
        "vocab_size": 2**31 - 1,
        "intermediate_size": 2**31 - 1,
    }
    shape = read_shape(written(tmp_path, {"model_type": "llama", **sizes}))
    started = time.process_time()
    assert num_parameters(shape) > 2**40
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", ["[]", '"qwen2"', "3", "null"])
def test_a_config_is_an_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HflowError, match="HF303.*no JSON object"):
        read_shape(str(tmp_path))
