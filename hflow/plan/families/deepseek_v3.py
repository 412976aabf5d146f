"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, and experts in all but the first layers. No engine
builds it: plans only. The layer that predicts a second token is left out, as transformers leaves it out."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE
from hflow.plan.families.family import Family
from hflow.plan.families.shared_experts import shared_experts
from hflow.plan.model_config import ModelConfig
from hflow.plan.model_shape import LatentAttention


def _latent(config: ModelConfig) -> LatentAttention:
    return LatentAttention(
        config.size("q_lora_rank"),
        config.size("kv_lora_rank"),
        config.size("qk_rope_head_dim"),
        config.size("v_head_dim"),
    )


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3",
    checks=DENSE,
    runs=False,
    experts=shared_experts,
    latent=_latent,
)
