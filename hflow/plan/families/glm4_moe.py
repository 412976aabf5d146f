"""GLM-4.5 (arXiv:2508.06471): grouped-query attention, and experts in all but the first layers. No engine
builds it: plans only, which do not depend on it that positions turn a part of each head alone. The layer that
predicts a second token is left out, as transformers leaves it out."""

from __future__ import annotations

from hflow.plan.families.checks import mlp_bias, other_activation, quantized
from hflow.plan.families.family import Family
from hflow.plan.families.shared_experts import shared_experts

FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4Moe",
    checks=(other_activation, mlp_bias, quantized),
    runs=False,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    experts=shared_experts,
)
