"""A reward that even random weights get, and how far the sampler is from the actor that learns."""

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


@op("text: str[rows] -> score: f32[rows]")
def digits(text: list[str]) -> list[float]:
    """The share of digits in a response."""
    return [sum(map(str.isdigit, one)) / max(1, len(one)) for one in text]
