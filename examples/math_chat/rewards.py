"""Rewards of the example: the format earns a little, the right sum the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hflow.ops.op import op

FORMAT = re.compile(r"<answer>\d+</answer>")


@op("text: str[rows*k] -> score: f32[rows*k]")
def tagged(text: Sequence[Sequence[str]]) -> Tensor:
    """1 where a response is a number between the marks and nothing else."""
    return torch.tensor([[float(bool(FORMAT.fullmatch(t.strip()))) for t in row] for row in text])


@op("right: f32[rows*k], tagged: f32[rows*k] -> score: f32[rows*k]")
def total(right: Tensor, tagged: Tensor, *, share: float = 0.1) -> Tensor:
    """`share` for the format, the rest for the right sum."""
    return share * tagged + (1 - share) * right
