"""The engines: of each its name, its profile, and where its implementation is.

A new engine is a folder in ``hflow/runtime/engines``, a profile in ``hflow/plan/engines``, and here a name
and a line; CONTRIBUTING.md ("Where to add what") tells the rest. Only generate nodes can choose an engine:
nodes that train or score always run on `DEFAULT_ENGINE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hflow.plan.engine_profile import EngineProfile
from hflow.plan.engines import megatron, sglang, transformers

GenerationEngine = Literal["megatron", "sglang", "transformers"]
EngineName = Literal[GenerationEngine, "python"]
EngineChoice = Literal["auto", GenerationEngine]  # `auto`: the one with which a step is shortest

GENERATION_ENGINES: tuple[GenerationEngine, ...] = get_args(GenerationEngine)
ENGINE_CHOICES: tuple[EngineChoice, ...] = ("auto", *GENERATION_ENGINES)
AUTO_ENGINES: tuple[GenerationEngine, ...] = ("megatron", "sglang")  # transformers is there to compare with
DEFAULT_ENGINE: GenerationEngine = "megatron"  # of nodes with a model, where nobody chooses
MODELLESS_ENGINE: EngineName = "python"  # of nodes without


@dataclass(frozen=True)
class Registered:
    """`implementation`: ``module:class`` of a `hflow.runtime.engines.protocol.ModelEngine`, which only the
    runtime imports."""

    profile: EngineProfile
    implementation: str


ENGINES: Mapping[EngineName, Registered] = {
    "megatron": Registered(megatron.PROFILE, "hflow.runtime.engines.megatron.engine:MegatronModel"),
    "sglang": Registered(sglang.PROFILE, "hflow.runtime.engines.sglang.engine:SglangModel"),
    "transformers": Registered(
        transformers.PROFILE, "hflow.runtime.engines.transformers.engine:TransformersModel"
    ),
}


def profile_of(engine: EngineName) -> EngineProfile:
    """Of an engine that runs models."""
    return ENGINES[engine].profile
