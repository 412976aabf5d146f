"""Megatron's configuration of a model, with the shape that it was made from.

Megatron hands its configuration on to every module: so those of hflow's find in it what Megatron has no names
for, such as how rotary positions are scaled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.groups import Groups


@dataclass
class ShapedConfig(TransformerConfig):
    """`shape`: of the whole model, all pipeline stages together. `groups`: of the mesh that it is on."""

    shape: ModelShape = field(kw_only=True)
    groups: Groups = field(kw_only=True)


def shape_of_model(model: torch.nn.Module) -> ModelShape:
    """Of a model that `build_model` made, or of what wraps it."""
    config: Any = get_model_config(model)
    return cast("ShapedConfig", config).shape
