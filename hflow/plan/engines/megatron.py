"""The profile of `hflow.runtime.engines.megatron`: it computes in the worker, and trains."""

from __future__ import annotations

from hflow.plan.engine_profile import EngineProfile

PROFILE = EngineProfile(
    title="Megatron",
    ops=("generate", "score", "train"),
    pipelines=("score", "train"),
    cuts_rows=("score", "train"),
    expert_parallel=("generate", "score", "train"),
    routes=("generate", "score", "train"),
    tensor_parallel=True,
    donates=True,
    offloads=True,
)
