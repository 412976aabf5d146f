"""A layer's experts in the place of its MLP, behind Megatron's interface for one.

Tensor parallelism splits the width of every expert, expert parallelism (`Groups.ep`) spreads them over
neighbouring data-parallel ranks. With sequence parallelism a rank of tp routes its own part of the places,
and experts read all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.moe.dispatch import Dispatch
from hflow.runtime.engines.megatron.moe.experts import GroupedExperts
from hflow.runtime.engines.megatron.moe.router import Router
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig
from hflow.runtime.engines.megatron.tensor_parallel_part import into_parts, sum_of_parts


class MixtureOfExperts(torch.nn.Module):
    """The sum of what a token's experts make of it, weighted by the router. `sequence_parallel`: whether a
    rank of tp has a part of the places, as Megatron's linear modules are told."""

    sequence_parallel = False

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
            padding_mask: what `RecomputingLayer` hands on as one.
        """
        tokens = hidden.flatten(0, -2)
        told = (padding_mask.rows, padding_mask.of_layer(self.number)) if padding_mask else ()
        routing = self.router(tokens, *told)
        # Each rank of tp makes a part of every expert's output, and so of the gradients of what goes in.
        sp = self.sequence_parallel
        tokens, weights = (into_parts(x, self.tp, sp) for x in (tokens, routing.weights))
        experts = into_parts(routing.experts, self.tp, sp) if sp else routing.experts
        dispatch = Dispatch(experts, self.num_experts, self.ep)
        made = dispatch.back(self.experts(dispatch.there(tokens), dispatch.counts))
        total = torch.bmm(weights[:, None].to(made.dtype), made).squeeze(1)
        return sum_of_parts(total, self.tp, sp).view(hidden.shape), None
