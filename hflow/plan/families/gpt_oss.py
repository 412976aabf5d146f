"""gpt-oss (arXiv:2508.10925): experts with biases and clamped gates in every layer, sinks in attention, and a
window in every other layer. Published weights of experts have 4 bits (MXFP4); they are unpacked as they are
read, and a plan counts them in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.families.checks import (
    check_choice,
    mlp_bias,
    no_dropout,
    other_activation,
    partial_rotary,
    quantized_otherwise,
)
from hflow.plan.families.family import Family
from hflow.plan.families.rotary import rotary_entries
from hflow.plan.families.windows import but_in_every
from hflow.plan.model_config import MAX_EXPERTS, ModelConfig
from hflow.plan.model_shape import Experts, GateClamp, ModelShape, SlidingWindow

# transformers', where a file has no such key
WINDOW, HEAD_DIM, THETA = 128, 64, 1.5e5
ROTARY = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
SLOPE, LIMIT = 1.702, 7.0


def _window(config: ModelConfig, layers: int) -> SlidingWindow | None:
    found = but_in_every(2, config, layers)
    return found if found is None or "sliding_window" in config.entries else replace(found, size=WINDOW)


def _experts(config: ModelConfig, layers: int) -> Experts:
    """transformers also reads `num_experts`. The softmax of the chosen experts' scores is what their
    probabilities among all are, divided by their sum."""
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = Experts(
        config.size(key, 128, most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok", 4),
        config.size("intermediate_size"),
        normalised=True,
        biased=True,
        clamp=GateClamp(config.number("swiglu_alpha", SLOPE), config.number("swiglu_limit", LIMIT)),
    )
    check_choice(experts)
    return experts


def _rotary(config: ModelConfig) -> ModelConfig:
    own = {"rope_theta": config.number("rope_theta", THETA)}
    if not rotary_entries(config).entries:
        own |= {"rope_parameters": ROTARY}
    return ModelConfig({**config.entries, **own})


def _complete(config: ModelConfig, shape: ModelShape) -> ModelShape:
    """Biases of attention are there unless the file says otherwise."""
    biased = config.flag("attention_bias") if config.has("attention_bias") else True
    return replace(shape, qkv_bias=biased, output_bias=biased, sinks=True)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOss",
    checks=(other_activation, mlp_bias, quantized_otherwise, no_dropout, partial_rotary),
    head_dim=HEAD_DIM,
    norm_eps=1e-5,
    window=_window,
    experts=_experts,
    stacked_experts=True,
    rotary=_rotary,
    complete=_complete,
)
