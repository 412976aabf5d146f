"""From an engine's name to the class that implements it, imported when it is first asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from hflow.plan.engine_registry import ENGINES, EngineName
from hflow.runtime.engines.protocol import ModelEngine


@cache
def implementation(engine: EngineName) -> type[ModelEngine]:
    """The class of an engine that runs models."""
    module, _, name = ENGINES[engine].implementation.partition(":")
    return getattr(import_module(module), name)
