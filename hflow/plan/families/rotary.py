"""What a ``config.json`` says of rotary positions: under `rope_parameters`, or the older `rope_scaling`."""

from __future__ import annotations

from hflow.plan.model_config import ConfigError, ModelConfig
from hflow.plan.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
    default_attention_factor,
)

DEFAULT_THETA = 10_000.0


def rope_theta(config: ModelConfig) -> float:
    """The base of the angles. Raises ConfigError when it is no number above 0."""
    own = config.number("rope_theta", DEFAULT_THETA)
    older = config.inner("rope_scaling").number("rope_theta", own)
    return config.inner("rope_parameters").number("rope_theta", older)


def no_scaling_conflict(config: ModelConfig) -> None:
    """Raises ConfigError when the two keys differ in the kind of scaling: transformers reads one of them."""
    older, newer = config.inner("rope_scaling"), config.inner("rope_parameters")
    if older.entries and newer.entries and _kind(older) != _kind(newer):
        raise ConfigError(
            f"scaled rotary positions: `rope_scaling` says {_kind(older)}, `rope_parameters` {_kind(newer)}"
            " (one of the keys is enough)"
        )


def read_scaling(config: ModelConfig, positions: int) -> RotaryScaling | None:
    """How the angles of a model with so many `positions` are scaled; None, if they are not.

    Raises:
        ConfigError: for a kind that hflow does not know, and values that are missing or of the wrong kind.
    """
    rotary = config.inner("rope_scaling")
    rotary = rotary if rotary.entries else config.inner("rope_parameters")
    kind = _kind(rotary)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_needed(rotary, "factor"))
    original = _original(config, rotary, positions)
    if kind == "llama3":
        return _llama3(rotary, original)
    if kind == "yarn":
        return _yarn(rotary, original)
    raise ConfigError(
        f"`rope_type`: scaled rotary positions ({kind}) are not supported (linear, llama3 and yarn are)"
    )


def _kind(rotary: ModelConfig) -> str:
    return str(rotary.entries.get("rope_type", rotary.entries.get("type", "default")))


def _needed(rotary: ModelConfig, key: str) -> float:
    rotary.value(key)
    return rotary.number(key, 1.0)


def _original(config: ModelConfig, rotary: ModelConfig, positions: int) -> int:
    """How many positions pretraining had: beside all other keys, or else among those of rotary positions."""
    key = "original_max_position_embeddings"
    return config.size(key, rotary.size(key, positions))


def _llama3(rotary: ModelConfig, original: int) -> Llama3Scaling:
    low, high = _needed(rotary, "low_freq_factor"), _needed(rotary, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"`low_freq_factor` is {low}, not below `high_freq_factor`, {high}")
    return Llama3Scaling(_needed(rotary, "factor"), low, high, original)


def _yarn(rotary: ModelConfig, original: int) -> YarnScaling:
    factor = _needed(rotary, "factor")
    if rotary.has("mscale") and rotary.has("mscale_all_dim"):
        tempered = default_attention_factor(factor, _needed(rotary, "mscale")) / default_attention_factor(
            factor, _needed(rotary, "mscale_all_dim")
        )
    else:
        tempered = default_attention_factor(factor)
    return YarnScaling(
        factor,
        original,
        attention_factor=rotary.number("attention_factor", tempered),
        beta_fast=rotary.number("beta_fast", 32.0),
        beta_slow=rotary.number("beta_slow", 1.0),
        truncate=rotary.flag("truncate") if rotary.has("truncate") else True,
    )
