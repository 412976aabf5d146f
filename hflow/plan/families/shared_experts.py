"""Experts as DeepSeek-V3 has them (arXiv:2412.19437): in all but the first layers, beside one MLP that all
tokens pass through, chosen by scores that are corrected to balance them."""

from __future__ import annotations

from hflow.plan.families.checks import check_choice
from hflow.plan.model_config import MAX_EXPERTS, ConfigError, ModelConfig
from hflow.plan.model_shape import Experts


def shared_experts(config: ModelConfig, layers: int) -> Experts:
    """Raises ConfigError for a value that is missing or wrong."""
    dense = config.entries.get("first_k_dense_replace", 0)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < layers:
        raise ConfigError(f"`first_k_dense_replace` is {dense!r}, not between 0 and {layers - 1}")
    width = config.size("moe_intermediate_size")
    experts = Experts(
        config.size("n_routed_experts", most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok"),
        width,
        shared_ffn=width * config.size("n_shared_experts") if config.has("n_shared_experts") else 0,
        dense_layers=dense,
        dense_ffn=config.size("intermediate_size") if dense else 0,
        scores_corrected=True,
    )
    check_choice(experts)
    return experts
