"""The profile of `hflow.runtime.engines.sglang`: servers that generate."""

from __future__ import annotations

from math import isclose

from hflow.plan.engine_profile import EngineProfile, ServerProfile
from hflow.plan.model_shape import ModelShape
from hflow.plan.rotary_scaling import YarnScaling, default_attention_factor

SERVER_PROFILE = ServerProfile(
    process_bytes=1_000_000_000,  # measured on a CPU
    chunk_tokens=4096,  # its unit in deterministic inference
    token_step_s={"cpu": 0.02},  # benchmarks/rollout.py
    sleeps_on=("cuda",),
)


def _lacks(shape: ModelShape) -> str:
    """Its models of these families read neither `sliding_window` nor `attention_factor` (SGLang 0.5.23)."""
    if shape.window:
        return f"a sliding window of {shape.window.size} tokens"
    if isinstance(shape.scaling, YarnScaling) and not isclose(
        shape.scaling.attention_factor, default_attention_factor(shape.scaling.factor)
    ):
        return f"an `attention_factor` of {shape.scaling.attention_factor:g}"
    return ""


PROFILE = EngineProfile(
    title="SGLang",
    ops=("generate",),
    tensor_parallel=True,
    vocab_unit=64,  # over tp it cuts a vocabulary that it has rounded up to a multiple of this
    in_flight=True,
    server=SERVER_PROFILE,
    lacks=_lacks,
)
