"""Root-mean-square norms, which multiply by an offset + a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call


def normed(x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
    """``[..., width]``, contiguous whatever the strides of `x`."""
    assert weight.shape == x.shape[-1:]
    found, x = x.new_empty(x.shape), x.contiguous()
    call("norm", x, x, weight, found, *_sizes(x), eps, offset)
    return found


def gradients(upstream: Tensor, x: Tensor, weight: Tensor, eps: float, offset: int) -> tuple[Tensor, Tensor]:
    """That of `x`, and that of the weight, float32 ``[width]``."""
    upstream, x = upstream.contiguous(), x.contiguous()
    of_x, of_weight = torch.empty_like(x), torch.empty(weight.shape, dtype=torch.float32)
    call("norm_gradient", x, upstream, x, weight, of_x, of_weight, *_sizes(x), eps, offset)
    return of_x, of_weight


def _sizes(x: Tensor) -> tuple[int, int]:
    """Rows and width."""
    return x.numel() // x.shape[-1], x.shape[-1]
