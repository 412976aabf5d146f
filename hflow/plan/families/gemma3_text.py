"""The text models of Gemma 3 (arXiv:2503.19786): to each layer without a window come five with one, which
turn by other angles; queries and keys are normalised."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.families.family import Family
from hflow.plan.families.gemma import CHECKS, HEAD_DIM, as_gemma, cap
from hflow.plan.families.rotary import rotary_kind
from hflow.plan.families.windows import FULL, SLIDING, but_in_every
from hflow.plan.model_config import ModelConfig
from hflow.plan.model_shape import ModelShape, SlidingWindow

PATTERN = 6  # transformers', where a file says neither `layer_types` nor `sliding_window_pattern`
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


def _capped_scores(config: ModelConfig, family: str) -> str:
    """transformers reads the key and caps nothing."""
    if not config.has("attn_logit_softcapping"):
        return ""
    return f"`attn_logit_softcapping` is not supported in {family} (null is; gemma2 has it)"


def _unlike_layers(config: ModelConfig, family: str) -> str:
    """`rope_parameters` has an object for each type of layer."""
    given = config.inner("rope_parameters")
    if given.entries and not {FULL, SLIDING} & set(given.entries):
        return f"`rope_parameters` has neither `{FULL}` nor `{SLIDING}`, which {family} reads there"
    kind = rotary_kind(given.inner(SLIDING))
    if kind != "default":
        return f"`rope_parameters`: {kind} in layers with a window is not supported (default is)"
    return ""


def _rotary(config: ModelConfig) -> ModelConfig:
    """What holds in layers without a window, where `rope_scaling` changes what `rope_parameters` says."""
    parts = config.inner("rope_parameters").inner(FULL), config.inner("rope_scaling")
    given = {key: value for part in parts for key, value in part.entries.items()}
    theta = config.number("rope_theta", GLOBAL_THETA)
    others = {key: value for key, value in config.entries.items() if key != "rope_scaling"}
    return ModelConfig({**others, "rope_theta": theta, "rope_parameters": given})


def _window(config: ModelConfig, layers: int) -> SlidingWindow | None:
    window = but_in_every(config.size("sliding_window_pattern", PATTERN), config, layers)
    theta = config.number("rope_local_base_freq", LOCAL_THETA)
    theta = config.inner("rope_parameters").inner(SLIDING).number("rope_theta", theta)
    return replace(window, rope_theta=theta) if window else None


def _complete(config: ModelConfig, shape: ModelShape) -> ModelShape:
    return replace(as_gemma(config, shape), logit_cap=cap(config, "final_logit_softcapping"))


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3",
    classifier="Gemma3Text",
    checks=(*CHECKS, _capped_scores, _unlike_layers),
    qk_norm=True,
    head_dim=HEAD_DIM,
    tied=True,
    window=_window,
    rotary=_rotary,
    complete=_complete,
)
