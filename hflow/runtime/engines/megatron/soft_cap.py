"""Soft caps: c tanh(x / c) instead of x, which is never beyond c (arXiv:2408.00118, section 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def soft_capped_(x: Tensor, cap: float | None) -> Tensor:
    """Overwrites x, and keeps nothing else for the backward pass; without a cap it is x."""
    return x if cap is None else _SoftCap.apply(x, cap)


def cap_(x: Tensor, cap: float) -> Tensor:
    """Overwrites x, for which there is no backward pass."""
    return x.div_(cap).tanh_().mul_(cap)


def slope_of(capped: Tensor, cap: float) -> Tensor:
    """The derivative where a cap gave `capped`."""
    return (capped / cap).square_().neg_().add_(1)


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:  # type: ignore[override]
        capped = cap_(x, cap)
        ctx.mark_dirty(x)
        ctx.save_for_backward(capped)
        ctx.cap = cap
        return capped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (capped,) = ctx.saved_tensors
        return slope_of(capped, ctx.cap).mul_(gradient), None
