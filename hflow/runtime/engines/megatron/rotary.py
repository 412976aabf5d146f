"""Rotary positions (arXiv:2104.09864): of the d dims of a head that turn, which are its first, dim i turns
together with dim i + d / 2."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hflow.plan.model_shape import ModelShape
from hflow.plan.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from hflow.runtime.engines.megatron.cpu_kernels import rotary as cpu_kernels
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on


@dataclass(frozen=True)
class Rotation:
    """By which angles tokens turn: `cos`, `sin` of them, ``[tokens, d / 2]``, in every layer of a kind."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> Rotation:
        """Of tokens at `positions`, int64 ``[tokens]``, found in float32; times the scaling's factor."""
        angles = torch.outer(positions.float(), frequencies(shape, positions.device))
        scaling = shape.scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0
        return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    @staticmethod
    def windowed(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> Rotation | None:
        """In layers with a window, if they turn by angles of their own."""
        if shape.window is None or shape.window.rope_theta is None:
            return None
        return Rotation.of(positions, replace(shape, rope_theta=shape.window.rope_theta, scaling=None), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, heads, d]``, turned."""
        return _Turn.apply(x, self.cos[:, None], self.sin[:, None])


def frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """By how much each pair of dims turns from one position to the next, float32 ``[d / 2]``."""
    turning = shape.rotary_dim or shape.head_dim
    powers = torch.arange(0, turning, 2, device=device).float() / turning
    plain = 1.0 / shape.rope_theta**powers
    match shape.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, shape.scaling)
        case YarnScaling():
            return _yarn(plain, shape.scaling, shape.rope_theta)
        case LongRopeScaling(factors=factors):
            return plain / torch.tensor(factors, device=device)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # within the positions of pretraining
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Between the two bounds, of dims counted in pairs, a ramp."""
    head_dim, length = 2 * len(plain), scaling.original_max_positions

    def dim_of(turns: float) -> float:
        """The pair, as a number with fractions, that turns so often within the positions of pretraining."""
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(len(plain), device=plain.device).float() - first
    stretched = (steps / (last - first if last != first else 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    if x.is_cuda:
        from hflow.runtime.engines.megatron.kernels import rotary  # where there is CUDA there is Triton

        return rotary.turned(x, cos.squeeze(1), sin.squeeze(1), sign)
    if runs_on(x, cos):
        return cpu_kernels.turned(x, cos.squeeze(1), sin.squeeze(1), sign)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    turning = 2 * cos.shape[-1]
    turned[..., turning:] = x[..., turning:]
    (a, b), (to_a, to_b) = (y[..., :turning].chunk(2, -1) for y in (x, turned))
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=sign)
    return turned
