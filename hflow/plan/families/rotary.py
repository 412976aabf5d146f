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


def turning_dims(config: ModelConfig, head_dim: int) -> int | None:
    """How many dims of a head turn by its position; None: all. Raises ConfigError when these are no pairs."""
    key = "partial_rotary_factor"
    own = config.number(key, 1.0)
    older = config.inner("rope_scaling").number(key, own)
    part = config.inner("rope_parameters").number(key, older)
    turning = int(head_dim * part)
    if not 2 <= turning <= head_dim or turning % 2:
        raise ConfigError(
            f"`{key}` {part:g} lets {turning} dims of {head_dim} turn, no even number from 2 to {head_dim}"
        )
    return turning if turning < head_dim else None


def no_scaling_conflict(config: ModelConfig) -> None:
    """Raises ConfigError when the two keys differ in the kind of scaling: transformers reads one of them."""
    older, newer = config.inner("rope_scaling"), config.inner("rope_parameters")
    kinds = rotary_kind(older), rotary_kind(newer)
    if older.entries and newer.entries and kinds[0] != kinds[1]:
        raise ConfigError(
            f"scaled rotary positions: `rope_scaling` says {kinds[0]}, `rope_parameters` {kinds[1]}"
            " (one of the keys is enough)"
        )


def read_scaling(config: ModelConfig, positions: int) -> RotaryScaling | None:
    """How the angles of a model with so many `positions` are scaled; None, if they are not.

    Raises:
        ConfigError: for a kind that hflow does not know, and values that are missing or of the wrong kind.
    """
    rotary = rotary_entries(config)
    kind = rotary_kind(rotary)
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


def rotary_entries(config: ModelConfig) -> ModelConfig:
    """What is under the key that transformers reads: the older one, if the file has both."""
    older = config.inner("rope_scaling")
    return older if older.entries else config.inner("rope_parameters")


def rotary_kind(rotary: ModelConfig) -> str:
    """How positions are scaled, in the words of config.json."""
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
