"""Rotary positions of all heads of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """``[tokens, heads, d]``, whose first dims turn by angles of `cos` and `sin`, ``[tokens, turning / 2]``;
    with sign -1 they turn back."""
    tokens, heads, width = x.shape
    assert cos.shape == sin.shape == (tokens, cos.shape[-1]) and 2 * cos.shape[-1] <= width
    x = x if x.stride(-1) == 1 else x.contiguous()
    found = torch.empty(x.shape, dtype=x.dtype)
    sizes = tokens, heads, cos.shape[-1], width, x.stride(0), x.stride(1)
    call("turned", x, x, cos.contiguous(), sin.contiguous(), found, *sizes, sign)
    return found
