"""The activation of a gated MLP (arXiv:2002.05202), behind Megatron's interface for one.

As written in Megatron, four products of the MLP's width are kept for the backward pass and two more are made
in it. This keeps what comes in, and makes the activation again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from hflow.plan.model_shape import Activation, GateClamp
from hflow.runtime.engines.megatron.cpu_kernels import gated as cpu_kernels
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on


@dataclass(frozen=True)
class _Gate:
    """An activation, and what writes its gradient into ``grad_input``."""

    name: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return silu(x) if self.name == "silu" else gelu(x, approximate="tanh")

    def backward(self, gradient: Tensor, x: Tensor, into: Tensor) -> None:
        if self.name == "silu":
            torch.ops.aten.silu_backward.grad_input(gradient, x, grad_input=into)
        else:
            torch.ops.aten.gelu_backward.grad_input(gradient, x, approximate="tanh", grad_input=into)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, of gate and up side by side: ``[..., 2 * ffn]`` to ``[..., ffn]``."""

    gate = _Gate("silu")

    def __init__(self, config: Any):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _Gated.apply(x, self.gate) if torch.is_grad_enabled() else _product(x, self.gate)


class GeGLU(SwiGLU):
    """gelu(gate) * up, with tanh in the place of the normal distribution."""

    gate = _Gate("gelu_tanh")


class ClampedSwiGLU(torch.nn.Module):
    """(up + 1) * gate * sigmoid(slope * gate), of gate and up within the limits of a clamp."""

    def __init__(self, clamp: GateClamp):
        super().__init__()
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 * ffn]``, gate and up side by side, to ``[..., ffn]``."""
        return _ClampedGated.apply(x, self.clamp)


def _kernels(x: Tensor) -> Any:
    """Those for tensors like `x`, if there are any."""
    if x.is_cuda:
        from hflow.runtime.engines.megatron.kernels import gated  # where there is CUDA there is Triton

        return gated
    return cpu_kernels if runs_on(x) else None


def _product(x: Tensor, activation: _Gate) -> Tensor:
    if kernels := _kernels(x):
        return kernels.product(x, activation.name)
    gate, up = x.chunk(2, -1)
    return activation(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: _Gate) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.activation = activation
        return _product(x, activation)

    @staticmethod
    def backward(ctx: Any, to_product: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if kernels := _kernels(x):
            return kernels.gradient(to_product, x, ctx.activation.name), None
        gradient = torch.empty_like(x)
        (gate, up), (to_gate, to_up) = x.chunk(2, -1), gradient.chunk(2, -1)
        active = ctx.activation(gate)
        torch.mul(to_product, active, out=to_up)
        torch.mul(to_product, up, out=active)
        ctx.activation.backward(active, gate, to_gate)
        return gradient, None


class _ClampedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clamp: GateClamp) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.clamp = clamp
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=clamp.limit)
        active = (gate * clamp.slope).sigmoid_().mul_(gate)
        return active.mul_(up.clamp(-clamp.limit, clamp.limit).add_(1))

    @staticmethod
    def backward(ctx: Any, to_product: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """With s = sigmoid(a g): the derivative of g s is s (1 + a g (1 - s)). A number beyond its limit has
        no gradient."""
        (x,), clamp = ctx.saved_tensors, ctx.clamp
        gradient = torch.empty_like(x)
        (gate, up), (to_gate, to_up) = x.chunk(2, -1), gradient.chunk(2, -1)
        within = up.abs() <= clamp.limit
        below, gate = gate <= clamp.limit, gate.clamp(max=clamp.limit)
        share = (gate * clamp.slope).sigmoid_()
        torch.mul(share, gate, out=to_up).mul_(to_product).mul_(within)
        slope = (1 - share).mul_(gate).mul_(clamp.slope).add_(1).mul_(share)
        torch.mul(slope, to_product, out=to_gate)
        to_gate.mul_(up.clamp(-clamp.limit, clamp.limit).add_(1)).mul_(below)
        return gradient, None
