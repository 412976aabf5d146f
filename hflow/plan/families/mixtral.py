"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer, whose weights sum to 1 for each token."""

from __future__ import annotations

from hflow.plan.families.checks import DENSE, check_choice
from hflow.plan.families.family import Family, every_token
from hflow.plan.families.windows import in_all_layers
from hflow.plan.model_config import MAX_EXPERTS, ModelConfig
from hflow.plan.model_shape import Experts, SlidingWindow


def _router_noise(config: ModelConfig, family: str) -> str:
    """transformers multiplies what the router reads in training by random numbers, which no seed of a plan
    determines."""
    if config.entries.get("router_jitter_noise") in (None, 0):
        return ""
    return "`router_jitter_noise`: a router with noise is not supported (0 is)"


def _experts(config: ModelConfig, layers: int) -> Experts:
    experts = Experts(
        config.size("num_local_experts", 8, most=MAX_EXPERTS // layers),
        config.size("num_experts_per_tok", 2),
        config.size("intermediate_size"),
        normalised=True,
        mixtral_names=True,
    )
    check_choice(experts)
    return experts


def _window(config: ModelConfig, layers: int) -> SlidingWindow | None:
    """Unlike Mistral's, a file without the key has no window."""
    return in_all_layers(config, layers) if config.has("sliding_window") else every_token(config, layers)


FAMILY = Family(
    name="mixtral",
    architecture="Mixtral",
    checks=(*DENSE, _router_noise),
    window=_window,
    experts=_experts,
)
