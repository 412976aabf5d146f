"""The model families by the `model_type` of their ``config.json``.

A new one is a file here, its name in `FamilyName`, and a line below. What it has that no other has goes into
`ModelShape`, and into the engines that build it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.plan.families import (
    deepseek_v3,
    gemma2,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from hflow.plan.families.family import Family
from hflow.plan.model_config import ConfigError, ModelConfig
from hflow.plan.model_shape import ModelShape

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        deepseek_v3, gemma2, gemma3_text, glm4_moe, gpt_oss, kimi_k2, llama, mistral, mixtral, phi3, qwen2,
        qwen3, qwen3_moe,
    )
}  # fmt: skip
# Of models that read images, too: the family of their text model.
TEXT_MODELS = {"gemma3": "gemma3_text"}
RUNNING = tuple(name for name, family in FAMILIES.items() if family.runs)
PLANNED = tuple(name for name, family in FAMILIES.items() if not family.runs)


def shape_of(config: ModelConfig) -> ModelShape:
    """The model that a ``config.json`` asks for.

    Raises:
        ConfigError: its family is not known, a value is missing or of the wrong kind, or it asks for what
            hflow does not know.
    """
    name = config.entries.get("model_type")
    if isinstance(name, str) and name in TEXT_MODELS:
        raise ConfigError(
            f"model_type `{name}` reads images, too, which is not supported (its text model is, in a folder"
            f" of its own: {TEXT_MODELS[name]}, {FAMILIES[TEXT_MODELS[name]].class_of('lm')})"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        known = f"{', '.join(RUNNING)} run, {', '.join(PLANNED)} can only be planned"
        raise ConfigError(f"model_type `{name}` is not supported; {known}")
    return FAMILIES[name].shape(config)
