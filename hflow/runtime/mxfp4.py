"""MXFP4, the 4-bit format of gpt-oss' published experts (OCP Microscaling Formats, version 1.0, 5.3 and 6.3).

Along the columns of a matrix each 32 numbers share a scale, a power of two. A number is one of 16, of which a
byte holds two, the first in its lower half.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
PACKED = BLOCK // 2  # bytes of them
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[..., 32 * n]`` of uint8 blocks ``[..., n, 16]`` and scales ``[..., n]``; exact, or infinite
    where float32 has no such number."""
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    powers = (scales.to(torch.int32) - _BIAS).unsqueeze(-1)
    return torch.ldexp(numbers[halves.int()], powers).flatten(-2)
