"""LongRoPE (arXiv:2402.13753), as Phi-3 and Phi-4-mini have it.

A sequence that is longer than those of pretraining turns by other angles than one that is not, from its first
token on: what was cached of it would be wrong once it grows beyond. So such a model has the positions of its
pretraining here, where the short factors hold, and longer rows are refused.
"""

from __future__ import annotations

from hflow.plan.families.rotary import rotary_entries, rotary_kind, turning_dims
from hflow.plan.model_config import ConfigError, ModelConfig
from hflow.plan.rotary_scaling import LongRopeScaling, longrope_attention_factor

DEFAULT_POSITIONS = 4096  # transformers' for the key `original_max_position_embeddings`


def longrope_scaling(config: ModelConfig, positions: int) -> LongRopeScaling | None:
    """None, if angles are not scaled.

    Raises:
        ConfigError: for another kind of scaling, and values that are missing or of the wrong kind.
    """
    rotary = rotary_entries(config)
    kind = rotary_kind(rotary)
    if kind == "default":
        return None
    if kind != "longrope":
        raise ConfigError(f"`rope_type`: {kind} is not supported in this family (longrope is)")
    original = config.size("original_max_position_embeddings", DEFAULT_POSITIONS)
    if original < 2:
        raise ConfigError(f"`original_max_position_embeddings` is {original}, not 2 or more")
    pairs = _turning(config) // 2
    for key in ("short_factor", "long_factor"):
        _check_factors(rotary, key, pairs)
    factors = tuple(map(float, rotary.items("short_factor")))
    stretch = positions / original
    tempered = longrope_attention_factor(rotary.number("factor", stretch), original)
    return LongRopeScaling(factors, original, stretch, rotary.number("attention_factor", tempered))


def _turning(config: ModelConfig) -> int:
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    width = config.size("head_dim", hidden // heads)
    return turning_dims(config, width) or width


def _check_factors(rotary: ModelConfig, key: str, pairs: int) -> None:
    """Raises ConfigError unless there is a positive number for each pair of dims that turns."""
    rotary.value(key)
    found = rotary.items(key)
    for value in found:
        ModelConfig({key: value}).number(key, 0.0)
    if len(found) != pairs:
        raise ConfigError(f"`{key}` has {len(found)} numbers for {pairs} pairs of dims that turn")
