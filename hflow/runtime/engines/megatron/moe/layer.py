"""A layer's experts in the place of its MLP, behind Megatron's interface for one.

Tensor parallelism splits the width of every expert, expert parallelism (`Groups.ep`) spreads them over
neighbouring data-parallel ranks. With sequence parallelism a rank of tp routes its own part of the places,
and experts read all of them. Or experts are whole, and spread over the ranks of tp, too: then each of these
sends a part of the places to them, with sequence parallelism its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hflow.runtime.engines.megatron.moe.dispatch import Dispatch
from hflow.runtime.engines.megatron.moe.experts import GroupedExperts
from hflow.runtime.engines.megatron.moe.router import Router, Routing
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.products import product
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
        self.whole = groups.expert_tp.size() < groups.tp.size()
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
        return self._mixed(tokens, routing).view(hidden.shape), None

    def _mixed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """``[tokens, hidden]``, of this rank's places with sequence parallelism, else of all."""
        sp = self.sequence_parallel
        if self.whole and sp:
            return self._made(tokens, routing.weights, routing.experts)
        # Each rank of tp makes a part of the sum for every token, or all of it for a part of the tokens, and
        # so of the gradients of what goes in.
        tokens, weights = (into_parts(x, self.tp, sp) for x in (tokens, routing.weights))
        experts = into_parts(routing.experts, self.tp, sp) if sp else routing.experts
        if not self.whole:
            return sum_of_parts(self._made(tokens, weights, experts), self.tp, sp)
        ranks, rank, count = self.tp.size(), self.tp.rank(), len(tokens)
        first, last = count * rank // ranks, count * (rank + 1) // ranks
        part = self._made(tokens[first:last], weights[first:last], experts[first:last])
        return sum_of_parts(pad(part, (0, 0, first, count - last)), self.tp, sp)

    def _made(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What this rank's peers make of `tokens`."""
        dispatch = Dispatch(experts, self.num_experts, self.ep)
        made = dispatch.back(self.experts(dispatch.there(tokens), dispatch.counts))
        return product(weights[:, None].to(made.dtype), made).squeeze(1)
