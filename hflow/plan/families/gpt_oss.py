"""gpt-oss (arXiv:2508.10925): experts with biases in every layer, sinks in attention, and a window in every
other layer. No engine builds it: plans only, which do not depend on how gates are clamped. Published weights
of experts have 4 bits (MXFP4); a plan counts them in the model's dtype."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.families.checks import check_choice, mlp_bias, other_activation
from hflow.plan.families.family import Family
from hflow.plan.families.windows import but_in_every
from hflow.plan.model_config import MAX_EXPERTS, ModelConfig
from hflow.plan.model_shape import Experts, ModelShape, SlidingWindow

WINDOW, HEAD_DIM = 128, 64  # transformers', where a file has no such key


def _window(config: ModelConfig, layers: int) -> SlidingWindow | None:
    found = but_in_every(2, config, layers)
    return found if found is None or "sliding_window" in config.entries else replace(found, size=WINDOW)


def _experts(config: ModelConfig, layers: int) -> Experts:
    experts = Experts(
        config.size("num_local_experts", 128, most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok", 4),
        config.size("intermediate_size"),
        biased=True,
    )
    check_choice(experts)
    return experts


def _complete(config: ModelConfig, shape: ModelShape) -> ModelShape:
    """Biases of attention are there unless the file says otherwise."""
    biased = config.flag("attention_bias") if config.has("attention_bias") else True
    return replace(shape, qkv_bias=biased, output_bias=biased, sinks=True)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOss",
    checks=(other_activation, mlp_bias),
    runs=False,
    head_dim=HEAD_DIM,
    window=_window,
    experts=_experts,
    complete=_complete,
)
