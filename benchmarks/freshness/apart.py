"""How far the sampler of tokens is from the actor that learns from them."""

from __future__ import annotations

from torch import Tensor

from hflow.ops.op import op


@op(
    "sampled: f32[rows, resp~]<behaviour>, now: f32[rows, resp~]<scored>, mask: bool[rows, resp~] "
    "-> difference: f32[rows]"
)
def apart(sampled: Tensor, now: Tensor, mask: Tensor) -> Tensor:
    """Mean |log-prob difference| of a row's tokens, nats."""
    return ((sampled - now).abs() * mask).sum(1) / mask.sum(1)
