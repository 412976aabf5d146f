"""A layer's experts in the place of its MLP, behind Megatron's interface for one.

Tensor parallelism splits the width of every expert, expert parallelism (`Groups.ep`) spreads them over
neighbouring data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from hflow.runtime.engines.megatron.moe.dispatch import Dispatch
from hflow.runtime.engines.megatron.moe.experts import GroupedExperts
from hflow.runtime.engines.megatron.moe.router import Router
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig


class MixtureOfExperts(torch.nn.Module):
    """The sum of what a token's experts make of it, weighted by the router."""

    def __init__(self, config: ShapedConfig, **_: Any):
        super().__init__()
        shape, groups = config.shape.moe, config.groups
        assert shape and shape.num_experts % groups.ep.size() == 0
        self.num_experts, self.tp, self.ep = shape.num_experts, groups.tp, groups.ep
        self.router = Router(config.hidden_size, shape, config.params_dtype, current_device())
        self.number, self._dense = 0, shape.dense_layers
        self.experts = GroupedExperts(shape.num_experts // groups.ep.size(), config)

    def set_layer_number(self, layer_number: int) -> None:
        """By Megatron, which counts from 1, over all stages. `number` counts from 0, layers with experts."""
        self.number = layer_number - 1 - self._dense

    def forward(self, hidden: Tensor, padding_mask: RoutedTokens | None = None) -> tuple[Tensor, None]:
        """``[..., hidden]`` of the like, and Megatron's absent bias. Collective over tp and ep.

        Args:
            padding_mask: what Megatron hands on as one.
        """
        tokens = hidden.flatten(0, -2)
        told = (padding_mask.rows, padding_mask.of_layer(self.number)) if padding_mask else ()
        routing = self.router(tokens, *told)
        # Each rank of tp makes a part of every expert's output, and so of the gradients of what goes in.
        tokens, weights = (
            copy_to_tensor_model_parallel_region(x, self.tp) for x in (tokens, routing.weights)
        )
        dispatch = Dispatch(routing.experts, self.num_experts, self.ep)
        made = dispatch.back(self.experts(dispatch.there(tokens), dispatch.counts))
        total = torch.bmm(weights[:, None].to(made.dtype), made).view(hidden.shape)
        return reduce_from_tensor_model_parallel_region(total, self.tp), None
