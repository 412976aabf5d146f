"""What profiles say of engines, and what these do."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from hflow.plan.engine_registry import (
    DEFAULT_ENGINE,
    ENGINES,
    GENERATION_ENGINES,
    MODELLESS_ENGINE,
    EngineName,
    GenerationEngine,
    profile_of,
)
from hflow.runtime.engines.implementation import implementation
from hflow.runtime.engines.protocol import ModelEngine, ModelWeights


def test_every_engine_that_a_plan_may_name_is_registered() -> None:
    assert set(ENGINES) == set(GENERATION_ENGINES)
    assert set(get_args(EngineName)) == {*GENERATION_ENGINES, MODELLESS_ENGINE}


def test_the_default_engine_runs_every_kind_of_node() -> None:
    assert set(profile_of(DEFAULT_ENGINE).ops) == {"generate", "score", "train"}
    assert all("generate" in profile_of(name).ops for name in GENERATION_ENGINES)


@pytest.mark.parametrize("name", GENERATION_ENGINES)
def test_an_engine_can_do_what_its_profile_says(name: GenerationEngine) -> None:
    """What the base class refuses is there, and nothing else."""
    engine, profile = implementation(name), profile_of(name)
    weights = get_type_hints(engine)["weights"]
    assert issubclass(engine, ModelEngine) and issubclass(weights, ModelWeights)
    assert (engine.begin is not ModelEngine.begin) == profile.in_flight
    assert (engine.offload is not ModelEngine.offload) == profile.offloads
    assert (engine.onload is not ModelEngine.onload) == profile.offloads
    assert (weights.donate is not ModelWeights.donate) == profile.donates
    assert (weights.take_back is not ModelWeights.take_back) == profile.donates
    assert (engine.close is not ModelEngine.close) == (profile.server is not None)
