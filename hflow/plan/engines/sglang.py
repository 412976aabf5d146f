"""The profile of `hflow.runtime.engines.sglang`: servers that generate."""

from __future__ import annotations

from math import isclose

from hflow.plan.engine_profile import EngineProfile, ServerProfile
from hflow.plan.model_shape import ModelShape
from hflow.plan.rotary_scaling import (
    LongRopeScaling,
    YarnScaling,
    default_attention_factor,
    longrope_attention_factor,
)

SERVER_PROFILE = ServerProfile(
    process_bytes=1_000_000_000,  # measured on a CPU
    chunk_tokens=4096,  # its unit in deterministic inference
    token_step_s={"cpu": 0.02},  # benchmarks/rollout.py
    sleeps_on=("cuda",),
)


def _lacks(shape: ModelShape) -> str:
    """Its models of these families read neither `sliding_window` nor `attention_factor`, nor, where
    transformers writes it, `partial_rotary_factor` (SGLang 0.5.23). Of Gemma as transformers 5 writes it, the
    second version does not start, and the third gives other tokens. Of gpt-oss, its server for CPUs does not
    start: the PyTorch backend of attention knows no sinks."""
    if shape.post_norms:
        return "layers of Gemma's kind"
    if shape.sinks:
        return "attention sinks"
    if shape.window:
        return f"a sliding window of {shape.window.size} tokens"
    if shape.rotary_dim:
        return f"rotary positions in {shape.rotary_dim} of {shape.head_dim} dims of each head"
    given = shape.scaling
    match given:
        case YarnScaling():
            usual = default_attention_factor(given.factor)
        case LongRopeScaling():
            usual = longrope_attention_factor(given.stretch, given.original_max_positions)
        case _:
            return ""
    if isclose(given.attention_factor, usual):
        return ""
    return f"an `attention_factor` of {given.attention_factor:g}"


PROFILE = EngineProfile(
    title="SGLang",
    ops=("generate",),
    tensor_parallel=True,
    vocab_unit=64,  # over tp it cuts a vocabulary that it has rounded up to a multiple of this
    in_flight=True,
    routes=("generate",),
    refills=True,
    pages=True,
    one_shot_sums=True,
    server=SERVER_PROFILE,
    lacks=_lacks,
)
