"""Rewards that a rule can give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def exact_match(text: Sequence[Sequence[str]], answer: Sequence[str]) -> Tensor:
    """1 where a response is the answer, else 0; white space around either does not count.

    Args:
        text: for each of `rows` prompts, its k responses.
        answer: one per prompt.

    Returns:
        float32 ``[rows, k]``.
    """
    pairs = zip(text, answer, strict=True)
    found = [[float(response.strip() == right.strip()) for response in row] for row, right in pairs]
    return torch.tensor(found, dtype=torch.float32).reshape(len(found), -1)
