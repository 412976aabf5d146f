"""Rotary positions (arXiv:2104.09864): dim i of a head turns together with dim i + d / 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """By which angles tokens turn: `cos`, `sin` of them, ``[tokens, d / 2]``; the same in every layer."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
        """Of tokens at `positions`, int64 ``[tokens]``: position * theta^(-2i / d), found in float32."""
        powers = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
        angles = torch.outer(positions.float(), 1.0 / theta**powers)
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, heads, d]``, turned."""
        return _Turn.apply(x, self.cos[:, None], self.sin[:, None])


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
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (to_a, to_b) = x.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=sign)
    return turned
