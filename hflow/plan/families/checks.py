"""What a ``config.json`` may ask for that no model of hflow is. Each says what is supported instead."""

from __future__ import annotations

from hflow.plan.model_config import ConfigError, ModelConfig
from hflow.plan.model_shape import Experts

MXFP4 = "mxfp4"


def other_activation(config: ModelConfig, family: str) -> str:
    asked = config.entries.get("hidden_act", "silu")
    return "" if asked == "silu" else f"hidden_act `{asked}` is not supported (silu is)"


def attention_bias(config: ModelConfig, family: str) -> str:
    """transformers would give the output projection of attention one, too."""
    if not config.flag("attention_bias"):
        return ""
    return (
        f"`attention_bias`: {family} with biases is not supported (false is; qwen2 has biases of queries,"
        " keys and values)"
    )


def mlp_bias(config: ModelConfig, family: str) -> str:
    if not config.flag("mlp_bias"):
        return ""
    return f"`mlp_bias`: {family} with biases is not supported (false is)"


def quantized(config: ModelConfig, family: str) -> str:
    if not config.has("quantization_config"):
        return ""
    return "quantized weights (quantization_config) are not supported (those in f32 and bf16 are)"


def quantized_otherwise(config: ModelConfig, family: str) -> str:
    """Of families whose published files have 4-bit weights, which are unpacked as they are read."""
    method = config.inner("quantization_config").entries.get("quant_method", MXFP4)
    if method == MXFP4:
        return ""
    return f"`quantization_config`: {method} is not supported ({MXFP4}, f32 and bf16 are)"


def no_dropout(config: ModelConfig, family: str) -> str:
    """A run computes the same model in training as in scoring."""
    asked = (key for key in ("resid_pdrop", "embd_pdrop", "attention_dropout") if config.has(key))
    key = next((key for key in asked if config.number(key, 0.0, zero=True)), "")
    return f"`{key}`: {family} with dropout is not supported (0 is)" if key else ""


def partial_rotary(config: ModelConfig, family: str) -> str:
    places = (config, config.inner("rope_scaling"), config.inner("rope_parameters"))
    if all(place.number("partial_rotary_factor", 1.0) == 1 for place in places):
        return ""
    return "`partial_rotary_factor`: rotary positions in a part of each head are not supported (1.0 is)"


def check_choice(experts: Experts) -> None:
    """Raises ConfigError when a token would pass through more experts than there are."""
    if experts.top_k > experts.num_experts:
        raise ConfigError(f"{experts.top_k} of {experts.num_experts} experts per token")


DENSE = (other_activation, attention_bias, mlp_bias, quantized, partial_rotary)
