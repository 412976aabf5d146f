"""The profile of `hflow.runtime.engines.megatron`: it computes in the worker, and trains."""

from __future__ import annotations

from hflow.plan.engine_profile import EngineProfile
from hflow.plan.model_shape import ModelShape


def _rows_stay_whole(shape: ModelShape) -> str:
    return "rows of models of Gemma's kind are not cut" if shape.post_norms else ""


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
    rows_stay_whole=_rows_stay_whole,
)
