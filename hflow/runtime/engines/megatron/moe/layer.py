"""A layer's experts in the place of its MLP, behind Megatron's interface for one.

Tensor parallelism splits the width of every expert, expert parallelism (`Groups.ep`) spreads them over
neighbouring data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear

from hflow.runtime.engines.megatron.gated import ClampedSwiGLU, SwiGLU
from hflow.runtime.engines.megatron.moe.dispatch import Dispatch
from hflow.runtime.engines.megatron.moe.router import Router
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig


class GatedExpert(torch.nn.Module):
    """This rank's part of one expert: gate and up one after the other, ``[2 * ffn / tp, hidden]``, and down,
    ``[hidden, ffn / tp]``, under the names that Megatron gives those of an MLP."""

    def __init__(self, config: ShapedConfig):
        super().__init__()
        experts = config.shape.moe
        assert experts
        width = config.shape.mlp_width // config.groups.tp.size()
        self.activation = ClampedSwiGLU(experts.clamp) if experts.clamp else SwiGLU(config)
        self.linear_fc1 = _ExpertLinear((2 * width, config.hidden_size), 0, config)
        self.linear_fc2 = _ExpertLinear((config.hidden_size, width), 1, config)

    def forward(self, rows: Tensor) -> Tensor:
        """A summand over tp of ``[rows, hidden]``."""
        return self.linear_fc2(self.activation(self.linear_fc1(rows)))


class _ExpertLinear(torch.nn.Module):
    """This rank's part of a matrix, which tp splits along `dim`, and of its bias, if it has one: that of a
    matrix whose columns are split is whole on every rank of tp, and the first of them adds it."""

    def __init__(self, shape: tuple[int, int], dim: int, config: ShapedConfig):
        super().__init__()
        memory = torch.empty(shape, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(memory)
        self.bias: torch.nn.Parameter | None = None
        set_tensor_model_parallel_attributes(self.weight, True, dim, 1)
        self.by_columns, self.first = dim == 1, config.groups.tp.rank() == 0
        if config.shape.moe and config.shape.moe.biased:
            self.bias = torch.nn.Parameter(memory.new_empty(shape[0]))
            set_tensor_model_parallel_attributes(self.bias, dim == 0, 0, 1)
        for parameter in self.parameters():
            # How Megatron knows the weights whose gradients are summed over `expert_dp` instead of `dp`.
            parameter.allreduce = config.groups.ep.size() == 1  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Tensor:
        if self.bias is None or not self.by_columns:
            return linear(rows, self.weight, self.bias)
        return _AddedOnce.apply(linear(rows, self.weight), self.bias, self.first)


class _AddedOnce(torch.autograd.Function):
    """Rows with a bias on the first rank of tp, of summands over tp. On every rank the bias has its whole
    gradient, since that of a sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, first: bool) -> Tensor:  # type: ignore[override]
        return rows + bias if first else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, gradient.sum(0), None


class MixtureOfExperts(torch.nn.Module):
    """The sum of what a token's experts make of it, weighted by the router."""

    def __init__(self, config: ShapedConfig, **_: Any):
        super().__init__()
        shape, groups = config.shape.moe, config.groups
        assert shape and shape.num_experts % groups.ep.size() == 0
        self.num_experts, self.tp, self.ep = shape.num_experts, groups.tp, groups.ep
        self.router = Router(config.hidden_size, shape, config.params_dtype, current_device())
        self.number, self._dense = 0, shape.dense_layers
        here = range(shape.num_experts // groups.ep.size())
        self.experts = torch.nn.ModuleList(GatedExpert(config) for _ in here)

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
        made = dispatch.back(self._applied(dispatch.there(tokens), dispatch.counts))
        total = torch.bmm(weights[:, None].to(made.dtype), made).view(hidden.shape)
        return reduce_from_tensor_model_parallel_region(total, self.tp), None

    def _applied(self, copies: Tensor, counts: list[int]) -> Tensor:
        """Each expert of this rank on its slice."""
        parts = zip(self.experts, copies.split(counts))
        return torch.cat([expert(rows) if len(rows) else rows for expert, rows in parts])
