"""Shapes read from config.json are those that transformers builds."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from hflow.diagnostics import HflowError
from hflow.plan.families.registry import FAMILIES, PLANNED, RUNNING
from hflow.plan.file_tensors import file_tensors
from hflow.plan.flops import attention_flops
from hflow.plan.model_config import MAX_BYTES, MAX_LAYERS
from hflow.plan.model_shape import Experts, FamilyName, GateClamp, ModelShape, SlidingWindow
from hflow.plan.parameters import active_parameters, num_parameters, parameters
from hflow.plan.read_shape import read_shape
from hflow.plan.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    YarnScaling,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 32, "max_position_embeddings": 128, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHARED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip
OF_FAMILIES: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": EXPERTS,
    "glm4_moe": SHARED,
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": SHARED | LATENT,
    "kimi_k2": SHARED | LATENT,
}
MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"kimi_k2"}))  # which transformers does not know
def test_a_config_of_transformers_is_read(family: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own_width = family.startswith(("qwen3", "gemma"))
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim" or own_width}
    more = OF_FAMILIES.get(family, {}) | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **sizes, **more, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.family == family and shape.tied == tied
    corrections = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert num_parameters(shape) == sum(p.numel() for p in (*model.parameters(), *corrections))
    assert shape.qk_norm == any("q_norm" in name for name, _ in model.named_parameters())
    assert shape.qkv_bias == any("q_proj.bias" in name for name, _ in model.named_parameters())
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shape.moe or {t.name: t.shape for t in file_tensors(shape)} == theirs


DENSE = {**SIZES, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("asked", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.5}, LinearScaling(2.5)),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        (LLAMA3 | {"original_max_position_embeddings": 16}, Llama3Scaling(8.0, 1.0, 4.0, 16)),
        ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(4.0, 128, 0.1 * math.log(4) + 1)),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "truncate": False},
         YarnScaling(4.0, 128, 0.5, truncate=False)),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 8},
         YarnScaling(4.0, 128, 1.0, beta_fast=8.0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gemma3_text", "phi3"}))
def test_scaled_positions_are_read(
    family: str, key: str, asked: dict[str, Any], scaling: RotaryScaling | None, tmp_path: Path
) -> None:
    sizes = {"model_type": family, **SIZES, **OF_FAMILIES.get(family, {})}
    shape = read_shape(written(tmp_path, {**sizes, key: asked, "rope_theta": 5e5}))
    assert (shape.scaling, shape.rope_theta) == (scaling, 5e5)
    beside = {"original_max_position_embeddings": 64} if asked.get("rope_type") in ("llama3", "yarn") else {}
    shape = read_shape(written(tmp_path, {**sizes, key: asked, **beside}))
    assert getattr(shape.scaling, "original_max_positions", 64) == 64


OLDER = {
    "rope_theta": 2e6,
    "rope_local_base_freq": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
NEWER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


@pytest.mark.parametrize(
    ("asked", "theta", "local_theta", "scaling"),
    [
        ({}, 1e6, 1e4, None),
        (OLDER, 2e6, 500.0, LinearScaling(8.0)),
        ({"rope_parameters": NEWER}, 2e6, 500.0, LinearScaling(8.0)),
    ],
    ids=["neither", "older", "newer"],
)
def test_layers_with_a_window_turn_by_other_angles(
    asked: dict[str, Any], theta: float, local_theta: float, scaling: RotaryScaling | None, tmp_path: Path
) -> None:
    """Also with one over all positions, which hides none; transformers' own reading says the same."""
    transformers = pytest.importorskip("transformers")
    folder = written(tmp_path, {"model_type": "gemma3_text", **DENSE, **asked, "sliding_window_pattern": 3})
    shape, config = read_shape(folder), transformers.AutoConfig.from_pretrained(folder)
    assert (shape.rope_theta, shape.scaling) == (theta, scaling)
    assert shape.window == SlidingWindow(4096, (0, 1), local_theta)
    assert config.layer_types == [SLIDING, SLIDING, FULL]
    assert config.rope_parameters[FULL]["rope_theta"] == theta
    assert config.rope_parameters[SLIDING]["rope_theta"] == local_theta


def test_what_a_file_of_gemma_does_not_say_is_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for family in ("gemma2", "gemma3_text"):
        folder = written(
            tmp_path, {"model_type": family, **{k: v for k, v in DENSE.items() if k != "head_dim"}}
        )
        shape, config = read_shape(folder), transformers.AutoConfig.from_pretrained(folder)
        assert (shape.tied, shape.head_dim, shape.norm_eps) == (True, config.head_dim, config.rms_norm_eps)
        assert shape.query_scalar is None and config.query_pre_attn_scalar == config.head_dim
        assert shape.attention_cap == config.attn_logit_softcapping
        assert shape.logit_cap == config.final_logit_softcapping
    asked = {"attn_logit_softcapping": None, "final_logit_softcapping": 7.0, "query_pre_attn_scalar": 64}
    shape = read_shape(written(tmp_path, {"model_type": "gemma2", **DENSE, **asked}))
    assert (shape.attention_cap, shape.logit_cap, shape.query_factor) == (None, 7.0, 0.5)


SHORT, LONG = [1.0, 1.5] * 4, [4.0, 9.0] * 4
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
PHI = {"model_type": "phi3", **DENSE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("asked", "original", "factor"),
    [
        (LONGROPE, 64, math.sqrt(1 + math.log(2) / math.log(64))),
        (LONGROPE | {"factor": 8.0}, 64, math.sqrt(1 + math.log(8) / math.log(64))),
        (LONGROPE | {"attention_factor": 0.5}, 64, 0.5),
        (LONGROPE, 256, 1.0),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longrope_has_the_positions_of_its_pretraining(
    key: str, asked: dict[str, Any], original: int, factor: float, tmp_path: Path
) -> None:
    """Within which transformers takes the short factors."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = PHI | {"hidden_size": 128}  # of which transformers takes the width of heads
    folder = written(tmp_path, {**sizes, key: asked, "original_max_position_embeddings": original})
    shape = read_shape(folder)
    assert shape.max_positions == min(128, original)
    assert shape.scaling == LongRopeScaling(tuple(SHORT), original, 128 / original, factor)
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cos, _ = theirs(torch.zeros(1), torch.arange(shape.max_positions)[None])
    assert cos.max().item() == pytest.approx(factor)
    torch.testing.assert_close(theirs.inv_freq, 1e4 ** (-torch.arange(8) / 8) / torch.tensor(SHORT))


def test_a_part_of_each_head_turns(tmp_path: Path) -> None:
    for some in ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}):
        assert read_shape(written(tmp_path, PHI | some)).rotary_dim == 8  # of 16
    assert read_shape(written(tmp_path, PHI | {"partial_rotary_factor": 1.0})).rotary_dim is None


SOME = {"use_sliding_window": True, "sliding_window": 16}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "asked", "window"),
    [
        ("mistral", {"sliding_window": 16}, SlidingWindow(16, (0, 1, 2))),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 128}, None),  # hides none of 128 positions
        ("mistral", {"max_position_embeddings": 8192}, SlidingWindow(4096, (0, 1, 2))),
        ("phi3", {"sliding_window": 16, "pad_token_id": 0}, SlidingWindow(16, (0, 1, 2))),
        ("phi3", {"max_position_embeddings": 8192, "pad_token_id": 0}, None),
        ("gemma2", {"sliding_window": 16}, SlidingWindow(16, (0, 2))),
        ("gemma2", {"sliding_window": 16, "layer_types": [FULL, FULL, SLIDING]}, SlidingWindow(16, (2,))),
        *((family, *case) for family in ("qwen2", "qwen3") for case in (
            (SOME | {"max_window_layers": 1}, SlidingWindow(16, (1, 2))),
            (SOME | {"max_window_layers": 0}, SlidingWindow(16, (0, 1, 2))),
            (SOME | {"max_window_layers": 3}, None),
            (SOME, None),
            (SOME | {"layer_types": [SLIDING, FULL, SLIDING]}, SlidingWindow(16, (0, 2))),
            (SOME | {"layer_types": [FULL] * 3, "max_window_layers": 0}, None),
            ({"sliding_window": 16, "max_window_layers": 0}, None),
        )),
    ],
)  # fmt: skip
def test_windows_are_those_of_transformers(
    family: str, asked: dict[str, Any], window: SlidingWindow | None, tmp_path: Path
) -> None:
    """transformers' own reading of the file says which layers have one."""
    transformers = pytest.importorskip("transformers")
    folder = written(tmp_path, {"model_type": family, **DENSE, **asked})
    shape, config = read_shape(folder), transformers.AutoConfig.from_pretrained(folder)
    assert shape.window == window
    types = getattr(config, "layer_types", None) or [SLIDING if config.sliding_window else FULL] * 3
    sizes = [config.sliding_window if kind == SLIDING else None for kind in types]
    assert [shape.window_of(layer) for layer in range(3)] == [
        size if size and size < shape.max_positions else None for size in sizes
    ]


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("llama", {"use_sliding_window": True}, "`use_sliding_window`, `layer_types`: sliding-window"),
        ("llama", {"attention_bias": True}, "`attention_bias`: llama with biases is not supported"),
        ("llama", {"mlp_bias": True}, "`mlp_bias`: llama with biases is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act `gelu` is not supported (silu is)"),
        ("mistral", {"layer_types": [FULL] * 3}, "in some layers is not supported"),
        ("mistral", {"sliding_window": 0}, "`sliding_window` is 0, not between 1"),
        ("gemma2", {"hidden_activation": "gelu"}, "`hidden_activation` gelu is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "sees later tokens is not supported"),
        ("gemma2", {"sliding_window": None}, "`sliding_window` is null"),
        (
            "gemma2",
            {"final_logit_softcapping": 0},
            "`final_logit_softcapping` is 0, no finite",
        ),
        ("gemma3", {}, "reads images, too, which is not supported (its text model is"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "(null is; gemma2 has it)"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "neither `full_attention` nor"),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}},
            "yarn in layers with",
        ),
        ("phi3", {"resid_pdrop": 0.1}, "`resid_pdrop`: phi3 with dropout is not supported (0 is)"),
        (
            "phi3",
            {"rope_scaling": LLAMA3},
            "`rope_type`: llama3 is not supported in this family (longrope is)",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": SHORT}}, "no key 'long_factor'"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"short_factor": SHORT[1:]}},
            "has 7 numbers for 8 pairs",
        ),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 8}}, "`long_factor` is 0.0, no finite"),
        ("phi3", {"partial_rotary_factor": 0.2}, "lets 3 dims of 16 turn, no even number from 2 to 16"),
        ("phi3", {"layer_types": [FULL] * 3, "sliding_window": 8}, "in some layers is not supported"),
        ("qwen2", SOME | {"layer_types": [SLIDING]}, "`layer_types` has 1 entries for 3 layers"),
        ("qwen2", {"layer_types": [SLIDING] * 3}, "there is no window"),
        ("qwen3", SOME | {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
        ("qwen3", {"attention_bias": True}, "qwen2 has biases of queries, keys and values"),
        ("qwen3", {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "yarn"}}, "`rope_scaling` says"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    family: str, asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(HflowError) as caught:
        read_shape(written(tmp_path, {"model_type": family, **DENSE, **asked}))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "HF303" and message in diagnostic.message


def test_a_window_lightens_attention() -> None:
    """Half of the layers see 16 of 64 tokens: 40 on average."""
    shape = ModelShape("qwen3", 4, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, False)
    windowed = replace(shape, window=SlidingWindow(16, (1, 3)))
    assert attention_flops(windowed, 10, 64) == attention_flops(shape, 10, 40)
    assert attention_flops(windowed, 10, 16) == attention_flops(shape, 10, 16)


def test_families_are_those_of_shapes() -> None:
    assert tuple(FAMILIES) == get_args(FamilyName) == tuple(sorted(FAMILIES))


def test_experts(tmp_path: Path) -> None:
    """6 experts of 3·64·24 weights in 3 layers, of which each token meets 2."""
    shape = read_shape(written(tmp_path, MOE))
    assert shape.moe == Experts(num_experts=6, top_k=2, ffn=24)
    assert (shape.ffn, shape.mlp_width) == (48, 24)
    assert num_parameters(shape) - active_parameters(shape) == 3 * (6 - 2) * 3 * 64 * 24
    # transformers 5 writes another name than the published files have
    renamed = {"num_local_experts" if k == "num_experts" else k: v for k, v in MOE.items()}
    assert read_shape(written(tmp_path, renamed)) == shape


def test_mixtral(tmp_path: Path) -> None:
    """A window where the file has one, no noise in the router, and names of its own."""
    mixtral = {"model_type": "mixtral", **DENSE, "num_local_experts": 6, "num_experts_per_tok": 2}
    shape = read_shape(written(tmp_path, mixtral))
    assert shape.moe == Experts(6, 2, 96, normalised=True, mixtral_names=True) and shape.window is None
    names = [p.name for p in parameters(shape) if p.name.startswith("model.layers.1.block_sparse_moe")]
    assert [name.split("moe.")[1] for name in names[:3]] == ["gate.weight", *(
        f"experts.0.{own}.weight" for own in ("w1", "w3")
    )]  # fmt: skip
    windowed = read_shape(written(tmp_path, mixtral | {"sliding_window": 8}))
    assert windowed.window == SlidingWindow(8, (0, 1, 2))
    with pytest.raises(HflowError, match="router_jitter_noise"):
        read_shape(written(tmp_path, mixtral | {"router_jitter_noise": 0.1}))
    read_shape(written(tmp_path, mixtral | {"router_jitter_noise": 0.0}))


def test_gpt_oss(tmp_path: Path) -> None:
    """What a file does not say is as in transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"}
    folder = written(tmp_path, {"model_type": "gpt_oss", **sizes})
    shape, config = read_shape(folder), transformers.AutoConfig.from_pretrained(folder)
    rotary = config.rope_parameters
    assert shape.moe and shape.moe.clamp == GateClamp(config.swiglu_alpha, config.swiglu_limit)
    assert (shape.moe.num_experts, shape.moe.top_k) == (config.num_local_experts, config.num_experts_per_tok)
    assert (shape.head_dim, shape.norm_eps) == (config.head_dim, config.rms_norm_eps)
    assert (shape.rope_theta, rotary["rope_type"]) == (rotary["rope_theta"], "yarn")
    factor, original = rotary["factor"], rotary["original_max_position_embeddings"]
    assert shape.scaling == YarnScaling(factor, original, 0.1 * math.log(factor) + 1, truncate=False)
    assert shape.qkv_bias and shape.output_bias and shape.sinks
    for changes, problem in (
        ({"attention_dropout": 0.1}, "`attention_dropout`"),
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`: fp8 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act `gelu`"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`"),
        ({"swiglu_limit": 0}, "`swiglu_limit` is 0, no finite number above 0"),
    ):
        with pytest.raises(HflowError) as caught:
            read_shape(written(tmp_path, {"model_type": "gpt_oss", **SIZES, **changes}))
        assert problem in str(caught.value)
    config.attention_bias = False
    config.save_pretrained(tmp_path)
    unbiased = transformers.AutoModelForCausalLM.from_config(config)
    assert num_parameters(read_shape(folder)) == sum(p.numel() for p in unbiased.parameters())


def test_a_dense_model_is_active_as_a_whole() -> None:
    shape = ModelShape("llama", 2, 64, 8, 4, 8, 96, 32, 128, 1e4, 1e-6, False, False)
    assert active_parameters(shape) == num_parameters(shape) and shape.mlp_width == 96
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 4 * 8 * 2  # k and v, layers, kv heads, head dim, bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "dbrx"}, f"{', '.join(RUNNING)} run, {', '.join(PLANNED)} can only be planned"),
        ({"model_type": ["llama"]}, "model_type `['llama']` is not supported"),
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
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "scaled rotary positions (dynamic)"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "(linear, llama3 and yarn are)"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "no key 'factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no key 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "`factor` is 0, no finite number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no key 'low_freq_factor'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "`low_freq_factor` is 4.0, not below"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "is 0, not between 1"),
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


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen2.5-0.5B", "hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B"),
        ("models/mine", "hflow new-model models/mine"),
        ("tests/mine", "hflow new-model tests/mine"),
        ("./here/mine", "hflow new-model ./here/mine"),
    ],
)
def test_a_name_on_the_hub_is_no_folder(path: str, command: str) -> None:
    with pytest.raises(HflowError) as caught:
        read_shape(path)
    assert f"`{command}`" in caught.value.diagnostics[0].help


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "models/Qwen2.5-7B"])
def test_a_model_that_is_not_here_can_be_planned_by_its_shape(path: str) -> None:
    with pytest.raises(HflowError) as caught:
        read_shape(path)
    assert caught.value.diagnostics[0].help.endswith("to plan without weights: `shape:qwen2.5-7b`")


def test_a_misspelt_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    with pytest.raises(HflowError) as caught:
        read_shape(str(tmp_path / "tinny"))
    assert caught.value.diagnostics[0].help.startswith(f"did you mean `{tmp_path / 'tiny'}`?")
    with pytest.raises(HflowError) as caught:
        read_shape(str(tmp_path / "critic"))
    assert "did you mean" not in caught.value.diagnostics[0].help
