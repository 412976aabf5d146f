"""Functions of functions.py, written so that they write into what they are given and return it."""

from __future__ import annotations

from torch import Tensor

from hflow.ops.op import op


@op("length: f32[rows] -> centred: f32[rows]", whole_batch=True)
def centre(length: Tensor) -> Tensor:
    length -= length.mean()
    return length


@op("length: f32[rows], centred: f32[rows] -> gap: f32[rows], centred: f32[rows]")
def compare(length: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    """How far apart a value and what was made of it are; nothing, where the two are one memory."""
    return length.sub_(centred), centred


@op(
    "length: f32[rows], gap: f32[rows], total: f32[], older: f32[] -> "
    "mean: f32[], gap: f32[], total: f32[], twice: f32[]",
    whole_batch=True,
)
def running_total(
    length: Tensor, gap: Tensor, total: Tensor, older: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total += length.mean()
    return length.mean(), gap.mean(), total, older


@op("score: f32[rows, resp~]<scored>, factor: f32[] -> score: f32[rows, resp~], scaled: f32[rows]")
def scale(score: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    score *= factor
    scaled = factor.repeat(len(score))
    factor.zero_()
    return score, scaled
