"""The model families by the `model_type` of their ``config.json``.

A new one is a file here, its name in `FamilyName`, and a line below. What it has that no other has goes into
`ModelShape`, and into the engines that build it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.plan.families import deepseek_v3, glm4_moe, kimi_k2, llama, mistral, phi3, qwen2, qwen3, qwen3_moe
from hflow.plan.families.family import Family
from hflow.plan.model_config import ConfigError, ModelConfig
from hflow.plan.model_shape import ModelShape

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (deepseek_v3, glm4_moe, kimi_k2, llama, mistral, phi3, qwen2, qwen3, qwen3_moe)
}
RUNNING = tuple(name for name, family in FAMILIES.items() if family.runs)
PLANNED = tuple(name for name, family in FAMILIES.items() if not family.runs)


def shape_of(config: ModelConfig) -> ModelShape:
    """The model that a ``config.json`` asks for.

    Raises:
        ConfigError: its family is not known, a value is missing or of the wrong kind, or it asks for what
            hflow does not know.
    """
    name = config.entries.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = f"{', '.join(RUNNING)} run, {', '.join(PLANNED)} can only be planned"
        raise ConfigError(f"model_type `{name}` is not supported; {known}")
    return FAMILIES[name].shape(config)
