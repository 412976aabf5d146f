"""The activation of a gated MLP (SwiGLU, arXiv:2002.05202), behind Megatron's interface for one.

As written in Megatron, four products of the MLP's width are kept for the backward pass and two more are made
in it. This keeps what comes in, and makes the activation again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, of gate and up side by side: ``[..., 2 * ffn]`` to ``[..., ffn]``."""

    def __init__(self, config: Any):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, to_product: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient = torch.empty_like(x)
        (gate, up), (to_gate, to_up) = x.chunk(2, -1), gradient.chunk(2, -1)
        active = silu(gate)
        torch.mul(to_product, active, out=to_up)
        torch.mul(to_product, up, out=active)
        torch.ops.aten.silu_backward.grad_input(active, gate, grad_input=to_gate)
        return gradient
