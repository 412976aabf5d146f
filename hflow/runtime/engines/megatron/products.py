"""Products of matrices in bf16 on CPUs without instructions that torch's fast ones need.

On x86 without AVX-512 torch makes such a product one number after the other: up to a hundred times as slow as
in float32. There the factors are turned to float32 and the product back, which rounds it once, as a fast
product in bf16 does.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, with its backward pass."""
    return (widened(a) @ widened(b)).to(a.dtype)


def projected(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weightᵀ + bias``, with its backward pass; rounded once, as torch's `linear` is."""
    added = None if bias is None else widened(bias)
    return linear(widened(x), widened(weight), added).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """In float32 where torch's products in its dtype are slow, else as it is."""
    slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _has_fast_bf16()
    return x.float() if slow else x


@cache
def _has_fast_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
