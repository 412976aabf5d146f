"""Root-mean-square norms (arXiv:1910.07467). Their weights have the model's dtype, like all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hflow.runtime.engines.megatron.shaped_config import ShapedConfig


class RMSNorm(torch.nn.RMSNorm):
    """One that multiplies by its weight."""

    def __init__(self, config: ShapedConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Of sequence parallelism: each rank norms other places, and Megatron sums the gradients so marked.
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]


class OffsetRMSNorm(torch.nn.Module):
    """One that multiplies by 1 + its weight. This sum is float32, as is all up to the result: in bf16 small
    weights would be lost beside the 1."""

    def __init__(self, config: ShapedConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return _OffsetNorm.apply(x, self.weight, self.eps)


class _OffsetNorm(torch.autograd.Function):
    """Keeps what comes in, in the model's dtype, and computes the norm again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            normed = _normed(x, weight, ctx.eps)
        return *torch.autograd.grad(normed, (x, weight), gradient), None


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)


class NormedResidual(torch.nn.Module):
    """Normalises what attention or MLP gives and adds it to what went in, in the place of Megatron's sum with
    bias and dropout."""

    def __init__(self, config: ShapedConfig, norm: type[torch.nn.Module]):
        super().__init__()
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        """What Megatron calls, with neither bias nor dropout."""
        return lambda branch, residual, dropout: residual + self.norm(branch[0])
