"""Rotary positions of all heads of a token, with one pass over the memory."""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.runtime.engines.megatron.kernels import jit


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """``[tokens, heads, d]``, whose first dims turn by angles of `cos` and `sin`, ``[tokens, turning / 2]``;
    with sign -1 they turn back. What does not turn is copied."""
    tokens, heads, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if 2 * half < width:
        found[..., 2 * half :] = x[..., 2 * half :]
    if tokens:
        sizes = triton.next_power_of_2(heads), triton.next_power_of_2(half)
        _turn[(tokens,)](x, cos, sin, found, heads, half, width, x.stride(0), x.stride(1), sign, *sizes)
    return found


@jit
def _turn(
    x,
    cos,
    sin,
    out,
    heads,
    half,
    width,
    of_token,
    of_head,
    sign,
    all_heads: tl.constexpr,
    all_dims: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, all_heads)[:, None], tl.arange(0, all_dims)[None, :]
    inside = (head < heads) & (dim < half)
    first = x + token * of_token + head * of_head + dim
    a = tl.load(first, mask=inside).to(tl.float32)
    b = tl.load(first + half, mask=inside).to(tl.float32)
    c = tl.load(cos + token * half + dim, mask=dim < half).to(tl.float32)
    s = tl.load(sin + token * half + dim, mask=dim < half).to(tl.float32) * sign
    to = out + (token * heads + head) * width + dim
    tl.store(to, a * c - b * s, mask=inside)
    tl.store(to + half, b * c + a * s, mask=inside)
