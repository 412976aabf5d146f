"""Root-mean-square norms (arXiv:1910.07467). Their weights have the model's dtype, like all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hflow.runtime.engines.megatron.cpu_kernels import norm as kernels
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig

_CACHED = 1 << 17  # elements


class RMSNorm(torch.nn.RMSNorm):
    """One that multiplies by its weight."""

    def __init__(self, config: ShapedConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.is_cuda:  # there torch's kernel keeps no more than `_Norm`
            return _Norm.apply(x, self.weight, self.eps, 0)
        is_ours = runs_on(x, self.weight)
        return kernels.normed(x, self.weight, self.eps or 0.0, 0) if is_ours else super().forward(x)


class OffsetRMSNorm(torch.nn.Module):
    """One that multiplies by 1 + its weight. This sum is float32, as is all up to the result: in bf16 small
    weights would be lost beside the 1."""

    def __init__(self, config: ShapedConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)), eps
        _mark(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Norm.apply(x, self.weight, self.eps, 1)
        return _normed(x, self.weight, self.eps, 1)


def _mark(weight: torch.nn.Parameter) -> None:
    """Of sequence parallelism: each rank norms other places, and Megatron sums the gradients so marked."""
    weight.sequence_parallel = True  # type: ignore[attr-defined]


class _Norm(torch.autograd.Function):
    """Keeps what comes in, in the model's dtype, and computes the norm again. torch's own for CPUs keeps two
    more tensors of this size, in float32.

    What comes out has the strides of a new tensor, not of an embedding that Megatron has transposed: with
    those torch may multiply it as one small matrix per token, each with a copy of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return _normed(x, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """With n = x / rms(x) and y = w n: dw = sum(dy n), dx = (w dy - n mean(w dy n)) / rms(x)."""
        x, weight = ctx.saved_tensors
        if runs_on(x, weight):
            of_x, of_weight = kernels.gradients(gradient, x, weight, ctx.eps, ctx.offset)
            return of_x, of_weight.to(weight.dtype), None, None
        scale, of_x = ctx.offset + weight.to(_wide(x)), x.new_empty(x.shape)
        of_weight = torch.zeros_like(scale)
        for part, upstream, to in zip(_parts(x), _parts(gradient), _parts(of_x), strict=True):
            of_weight += _norm_backward(part, upstream.to(scale.dtype), scale, ctx.eps, to)
        return of_x, of_weight.to(weight.dtype), None, None


def _normed(x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    if runs_on(x, weight):
        return kernels.normed(x, weight, eps, offset)
    wide = _wide(x) if offset else x.dtype
    scale, result = (offset + weight.to(wide) if offset else weight), x.new_empty(x.shape)
    for part, to in zip(_parts(x), _parts(result), strict=True):
        to.copy_(rms_norm(part.to(wide), scale.shape, scale, eps))
    return result


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """``[places, h]`` each: few places on a CPU, so that what is made of them stays in its cache."""
    at_once = _CACHED if x.device.type == "cpu" else x.numel()
    return x.flatten(0, -2).split(max(1, at_once // x.shape[-1]))


def _norm_backward(x: Tensor, upstream: Tensor, weight: Tensor, eps: float, of_x: Tensor) -> Tensor:
    """The gradient of the weight; that of `x` is written to `of_x`. ``[places, h]`` each."""
    width, wide = x.shape[-1], x.to(weight.dtype)
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
    normed = wide * inverse
    product = upstream * normed
    mean = (product @ weight).div_(width).unsqueeze(-1)
    of_x.copy_((upstream * weight).sub_(normed.mul_(mean)).mul_(inverse))
    return product.sum(0)


def _wide(x: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(x.dtype, torch.float32)


class NormedResidual(torch.nn.Module):
    """Normalises what attention or MLP gives and adds it to what went in, in the place of Megatron's sum with
    bias and dropout."""

    def __init__(self, config: ShapedConfig, norm: type[torch.nn.Module]):
        super().__init__()
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        """What Megatron calls, with neither bias nor dropout."""
        return lambda branch, residual, dropout: residual + self.norm(branch[0])
