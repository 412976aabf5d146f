"""This rank's experts of a layer, each a gated MLP (arXiv:2002.05202), as two grouped products.

The matrices of all experts lie in one, one after the other: one operation multiplies each token's copy by the
matrix of its expert (torch's `grouped_mm`), on CUDA one kernel however many experts there are.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn.functional import grouped_mm

from hflow.runtime.engines.megatron.gated import ClampedSwiGLU, SwiGLU
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.products import projected, widened
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig

ALIGNED_BYTES = 16  # of which rows of grouped products are a multiple


class GroupedExperts(torch.nn.Module):
    """This rank's part of `count` experts. Of each: gate and up one after the other, ``[2 * ffn / tp,
    hidden]``, and down, ``[hidden, ffn / tp]``, under the names that Megatron gives those of an MLP; all of
    both where tp leaves experts whole (`Groups.expert_tp`)."""

    def __init__(self, count: int, config: ShapedConfig):
        super().__init__()
        experts = config.shape.moe
        assert experts
        width = config.shape.mlp_width // config.groups.expert_tp.size()
        self.activation = ClampedSwiGLU(experts.clamp) if experts.clamp else SwiGLU(config)
        self.linear_fc1 = _GroupedLinear(count, (2 * width, config.hidden_size), 0, config)
        self.linear_fc2 = _GroupedLinear(count, (config.hidden_size, width), 1, config)

    def forward(self, copies: Tensor, counts: list[int]) -> Tensor:
        """``[copies, hidden]``, or a summand of it over `Groups.expert_tp`. The first `counts` copies are
        those of the first expert, and so on."""
        if not len(copies):
            return copies
        of_each = torch.tensor(counts, device=copies.device)
        return self.linear_fc2(self.activation(self.linear_fc1(copies, of_each)), of_each)


class _GroupedLinear(torch.nn.Module):
    """This rank's part of a matrix of each expert, which tp splits along `dim` unless experts are whole, and
    of its bias, if it has one: that of a matrix whose columns are split is whole on every rank of tp, and the
    first of them adds it."""

    def __init__(self, count: int, shape: tuple[int, int], dim: int, config: ShapedConfig):
        super().__init__()
        rows, columns = shape
        memory = torch.empty(count * rows, columns, dtype=config.params_dtype, device=current_device())
        self.count, self.weight = count, torch.nn.Parameter(memory)
        self.bias: torch.nn.Parameter | None = None
        set_tensor_model_parallel_attributes(self.weight, True, dim, 1)
        cut, tp = config.groups.expert_tp, config.groups.tp
        self.adds_bias = dim == 0 or cut.rank() == 0
        if config.shape.moe and config.shape.moe.biased:
            self.bias = torch.nn.Parameter(memory.new_empty(count * rows))
            # On ranks of tp there are other rows of it, or other experts.
            set_tensor_model_parallel_attributes(self.bias, dim == 0 or cut.size() < tp.size(), 0, 1)
        for parameter in self.parameters():
            # How Megatron knows the weights whose gradients are summed over `expert_dp` instead of `dp`.
            parameter.allreduce = config.groups.ep.size() == 1  # type: ignore[attr-defined]

    def forward(self, copies: Tensor, counts: Tensor) -> Tensor:
        """`counts`: int64 ``[experts]``."""
        made = _products(copies, self.weight.unflatten(0, (self.count, -1)), counts)
        if self.bias is None:
            return made
        added = self.bias.unflatten(0, (self.count, -1)).repeat_interleave(counts, 0, output_size=len(made))
        return _AddedOnce.apply(made, added, self.adds_bias)


def _products(copies: Tensor, of_each: Tensor, counts: Tensor) -> Tensor:
    """Each expert's copies by its matrix of `of_each`, ``[experts, rows, columns]``: expert by expert where
    the rows that are multiplied do not end where `grouped_mm` needs it."""
    if any(width * copies.element_size() % ALIGNED_BYTES for width in of_each.shape[1:]):
        parts = zip(copies.split(counts.tolist()), of_each, strict=True)
        return torch.cat([projected(own, weight) for own, weight in parts])
    ends = counts.cumsum(0).to(torch.int32)
    return grouped_mm(widened(copies), widened(of_each).transpose(1, 2), offs=ends).to(copies.dtype)


class _AddedOnce(torch.autograd.Function):
    """Rows with biases where they are to be `added`, which is on one rank of those whose rows are summands.
    Biases have their whole gradient on every rank, since that of a sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases: Tensor, added: bool) -> Tensor:  # type: ignore[override]
        return rows + biases if added else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient, gradient, None
