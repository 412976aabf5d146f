"""Qwen3 with experts in every layer (arXiv:2505.09388)."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE, check_choice
from hflow.plan.families.family import Family
from hflow.plan.model_config import MAX_EXPERTS, ModelConfig
from hflow.plan.model_shape import Experts


def _in_some_layers(config: ModelConfig, family: str) -> str:
    if config.size("decoder_sparse_step", 1) == 1 and not config.items("mlp_only_layers"):
        return ""
    return (
        "`decoder_sparse_step`, `mlp_only_layers`: experts in some layers only are not supported (1 and an"
        " empty list are)"
    )


def _experts(config: ModelConfig, layers: int) -> Experts:
    """transformers 5 calls `num_local_experts` what the published files call `num_experts`."""
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = Experts(
        config.size(key, most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob"),
    )
    check_choice(experts)
    return experts


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3Moe",
    checks=(*DENSE, _in_some_layers),
    qk_norm=True,
    experts=_experts,
)
