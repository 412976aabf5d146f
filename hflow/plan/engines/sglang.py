"""The profile of `hflow.runtime.engines.sglang`: servers that generate."""

from __future__ import annotations

from hflow.plan.engine_profile import EngineProfile, ServerProfile

SERVER_PROFILE = ServerProfile(
    process_bytes=1_000_000_000,  # measured on a CPU
    chunk_tokens=4096,  # its unit in deterministic inference
    token_step_s={"cpu": 0.02},  # benchmarks/rollout.py
    sleeps_on=("cuda",),
)
PROFILE = EngineProfile(
    title="SGLang",
    ops=("generate",),
    tensor_parallel=True,
    vocab_unit=64,  # over tp it cuts a vocabulary that it has rounded up to a multiple of this
    in_flight=True,
    server=SERVER_PROFILE,
)
