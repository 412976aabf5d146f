"""The profile of `hflow.runtime.engines.transformers`: whole models, one row after the other."""

from __future__ import annotations

from hflow.plan.engine_profile import EngineProfile

PROFILE = EngineProfile(
    title="transformers",
    ops=("generate", "score"),
    lacks=lambda shape: "an adapter" if shape.adapter else "",
)
