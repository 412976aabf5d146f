"""Numbers less their mean, so exactly that equal numbers give 0."""

from __future__ import annotations

import torch
from torch import Tensor


def centred(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`values` less their mean along `dim`, and that mean.

    Both in float64: in float32 the mean of equal numbers differs from them by rounding, and what divides by
    their deviation makes advantages of order 1 out of that. Equal numbers give exactly 0.

    Returns:
        float64, the first of the shape of `values`, the second with size 1 at `dim`.
    """
    wide = values.double()
    mean = wide.mean(dim, keepdim=True)
    equal = values.amax(dim, keepdim=True) == values.amin(dim, keepdim=True)
    return torch.where(equal, 0.0, wide - mean), mean
