"""One token of each row: its queries and keys turn, and keys and values go to their place in the cache."""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.runtime.engines.megatron.kernels import jit


def place(
    x: Tensor,
    value: Tensor,
    tables: tuple[Tensor, Tensor],
    at: Tensor,
    cache: tuple[Tensor, Tensor],
    factor: float,
) -> Tensor:
    """Queries, ``[rows, groups, heads, d]``, turned and times the `factor`.

    Args:
        x: ``[rows, groups, heads + 1, d]``: of each group its queries, and the key that they share.
        value: ``[rows, groups, d]``.
        tables: cosines, and sines of which the second half has the sign of the angles, ``[length, turning]``.
        at: int64 ``[1]``, the place.
        cache: keys and values, ``[rows, groups, length, d]`` of the same strides, which are written to.
    """
    rows, groups, all_heads, width = x.shape
    (cos, sin), (keys, values) = tables, cache
    assert x.stride(-1) == value.stride(-1) == 1 and keys.stride() == values.stride()
    turning = cos.shape[-1]
    queries = torch.empty(rows, groups, all_heads - 1, width, dtype=x.dtype, device=x.device)
    sizes = triton.next_power_of_2(all_heads), triton.next_power_of_2(width)
    _place[(rows, groups)](
        x, value, cos, sin, at, queries, keys, values, all_heads - 1, width, turning, factor,
        *x.stride()[:3], *value.stride()[:2], *keys.stride()[:3], *sizes,
    )  # fmt: skip
    return queries


@jit
def _place(
    x, value, cos, sin, at, queries, keys, values, heads, width, turning, factor,
    x_row, x_group, x_head, value_row, value_group, cache_row, cache_group, cache_place,
    all_heads: tl.constexpr, all_dims: tl.constexpr,
):  # fmt: skip
    row, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head, dim, now = tl.arange(0, all_heads)[:, None], tl.arange(0, all_dims)[None, :], tl.load(at)
    inside, turns, half = (head <= heads) & (dim < width), dim < turning, turning // 2
    own = x + row * x_row + group * x_group + head * x_head
    mine = tl.load(own + dim, mask=inside, other=0.0).to(tl.float32)
    # dim i turns with dim i + half, by the angle of the former; sines of the first half have the other sign
    other = tl.load(own + tl.where(dim < half, dim + half, dim - half), mask=inside & turns, other=0.0)
    c = tl.load(cos + now * turning + dim, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + now * turning + dim, mask=turns, other=0.0).to(tl.float32)
    turned = mine * c + other.to(tl.float32) * s
    to_queries = queries + ((row * groups + group) * heads + head) * width + dim
    tl.store(to_queries, turned * factor, mask=inside & (head < heads))
    to_cache = row * cache_row + group * cache_group + now * cache_place
    tl.store(keys + to_cache + dim + 0 * head, turned, mask=inside & (head == heads))
    line = tl.arange(0, all_dims)
    given = tl.load(value + row * value_row + group * value_group + line, mask=line < width)
    tl.store(values + to_cache + line, given, mask=line < width)
