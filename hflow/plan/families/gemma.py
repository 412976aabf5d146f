"""What Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786) have in common: norms before and behind attention
and MLP that multiply by 1 + their weight, a scaled embedding, and a gate of GELU."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.families.checks import attention_bias, partial_rotary, quantized
from hflow.plan.model_config import ModelConfig
from hflow.plan.model_shape import ModelShape

HEAD_DIM = 256  # transformers', where a file does not say
QUERY_SCALAR = 256.0


def _other_gate(config: ModelConfig, family: str) -> str:
    """`hidden_act`, which older files have beside it, is not read by transformers."""
    asked = config.entries.get("hidden_activation", "gelu_pytorch_tanh")
    known = asked == "gelu_pytorch_tanh"
    return "" if known else f"`hidden_activation` {asked} is not supported (gelu_pytorch_tanh is)"


def _sees_later_tokens(config: ModelConfig, family: str) -> str:
    if not config.flag("use_bidirectional_attention"):
        return ""
    return "`use_bidirectional_attention`: a model that sees later tokens is not supported (false is)"


CHECKS = (_other_gate, _sees_later_tokens, attention_bias, partial_rotary, quantized)


def as_gemma(config: ModelConfig, shape: ModelShape) -> ModelShape:
    """The shape with what both have."""
    scalar = config.number("query_pre_attn_scalar", QUERY_SCALAR)
    return replace(
        shape,
        activation="gelu_tanh",
        query_scalar=scalar if scalar != shape.head_dim else None,
        offset_norms=True,
        post_norms=True,
        scaled_embedding=True,
    )


def cap(config: ModelConfig, key: str, default: float | None = None) -> float | None:
    """Under the key; null says that there is none. Raises ConfigError when it is no number above 0."""
    if key not in config.entries:
        return default
    return config.number(key, 0.0) if config.has(key) else None
