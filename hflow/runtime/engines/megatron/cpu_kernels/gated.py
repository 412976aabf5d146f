"""act(gate) * up of gate and up side by side, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.plan.model_shape import Activation
from hflow.runtime.engines.megatron.cpu_kernels.library import call


def product(x: Tensor, activation: Activation) -> Tensor:
    """``[..., ffn]`` of ``[..., 2 * ffn]``."""
    x, ffn = x.contiguous(), x.shape[-1] // 2
    found = x.new_empty(*x.shape[:-1], ffn)
    call("gated", x, activation == "gelu_tanh", x, found, found.numel() // ffn, ffn)
    return found


def gradient(to_product: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """That of `x`, ``[..., 2 * ffn]``, of that of the product, ``[..., ffn]``."""
    to_product, x, ffn = to_product.contiguous(), x.contiguous(), x.shape[-1] // 2
    found, rows = torch.empty_like(x), to_product.numel() // ffn
    call("gated_gradient", x, activation == "gelu_tanh", to_product, x, found, rows, ffn)
    return found
