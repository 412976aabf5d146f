"""Products of few rows with a matrix of weights, as in decoding: torch's are made for many rows."""

from __future__ import annotations

from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call, runs_on
from hflow.runtime.engines.megatron.products import projected

MOST_ROWS = 64  # with 128, torch's are as fast
COLUMNS, LINE = 8, 16  # of which outputs, and numbers of a row, there have to be multiples
LANES = 16  # or a part of them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weightᵀ + bias`` of ``[..., width]`` and ``[outputs, width]``, without a backward pass."""
    if not has_linear(x, weight):
        return projected(x, weight, bias)
    outputs, width = weight.shape
    x, rows = x.contiguous(), x.numel() // width
    found, space = x.new_empty(*x.shape[:-1], outputs), x.new_empty(room(rows, weight))
    call("linear", x, x, weight, bias, found, space, rows, width, outputs)
    return found


def has_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for a product of as many rows as `x` has, which need not be as wide."""
    outputs, width = weight.shape
    return (
        x.numel() <= MOST_ROWS * x.shape[-1]
        and outputs % COLUMNS == 0
        and width % LINE == 0
        and weight.is_contiguous()
        and runs_on(x, weight)
    )


def room(rows: int, *weights: Tensor) -> int:
    """The numbers that a product with any of these keeps meanwhile: floats, whatever their type."""
    widest = max(weight.shape[1] for weight in weights)
    return -(-rows // LANES) * LANES * widest * 4 // weights[0].itemsize
