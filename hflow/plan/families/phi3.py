"""Phi-3 (arXiv:2404.14219), Phi-4 (arXiv:2412.08905), Phi-4-mini (arXiv:2503.01743): Llama whose files have
queries, keys and values in one tensor, and gate and up projections in another. In Phi-4-mini a part of each
head turns by its position; models for long contexts have LongRoPE."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE, no_dropout, partial_rotary
from hflow.plan.families.family import Family, FusedTensor
from hflow.plan.families.longrope import longrope_scaling
from hflow.plan.families.rotary import turning_dims
from hflow.plan.families.windows import in_all_layers_if_named

FAMILY = Family(
    name="phi3",
    architecture="Phi3",
    checks=(*(check for check in DENSE if check is not partial_rotary), no_dropout),
    norm_eps=1e-5,
    window=in_all_layers_if_named,
    scaling=longrope_scaling,
    rotary_dim=turning_dims,
    fused=(
        FusedTensor("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        FusedTensor("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ),
)
