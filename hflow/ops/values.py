"""Losses of critics."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from hflow.ops.op import op


@op(
    "values: f32[rows, resp~]<trained>, old_values: f32[rows, resp~]<value>, returns: f32[rows, resp~], "
    "mask: bool[rows, resp~] -> loss: f32[rows, resp~], clip_fraction: f32[rows, resp~]"
)
def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: Annotated[float, Ge(0)] = 0.2
) -> tuple[Tensor, Tensor]:
    """Half the squared error, the worse of the plain and the clipped value (PPO for RLHF, arXiv:1909.08593).

        loss = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2

    A value that has moved towards the return by more than `clip` is held there until the next batch.

    Args:
        values, old_values: ``[rows, T]``, of the critic in training, and before the step's updates.
        returns: ``[rows, T]``, the targets R.
        mask: bool ``[rows, T]``, tokens that count.

    Returns:
        Loss and whether the value was held (1 or 0), each ``[rows, T]``, 0 outside the mask.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0) for x in (values, old_values, returns))
    plain = (values - returns).square()
    held = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, held) / 2, (held > plain).to(plain.dtype)
