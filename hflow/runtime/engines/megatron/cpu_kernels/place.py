"""One token of each row: its queries and keys turn, and keys and values go to their place in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call


def place(
    x: Tensor, value: Tensor, angles: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], factor: float
) -> Tensor:
    """Queries, ``[rows, groups, heads, d]``, turned and times the `factor`.

    Args:
        x: ``[rows, groups, heads + 1, d]``: of each group its queries, and the key that they share.
        value: ``[rows, groups, d]``.
        angles: cosines and sines, ``[turning / 2]``, of the place.
        cache: what keys and values are written to, ``[rows, groups, d]`` of the same strides.
    """
    rows, groups, all_heads, width = x.shape
    (cos, sin), (keys, values) = angles, cache
    assert keys.shape == values.shape == value.shape == (rows, groups, width)
    assert cos.shape == sin.shape and 2 * len(cos) <= width
    assert x.stride(-1) == value.stride(-1) == keys.stride(-1) == 1 and keys.stride() == values.stride()
    queries = torch.empty(rows, groups, all_heads - 1, width, dtype=x.dtype)
    sizes = rows, groups, all_heads - 1, len(cos), width
    strides = *x.stride()[:3], *value.stride()[:2], *keys.stride()[:2]
    call("place", x, x, value, cos, sin, queries, keys, values, *sizes, *strides, factor)
    return queries
