"""Functions of filters for the tests beside this file."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hflow.ops.op import op


@op("answer: str[rows], level: i64[rows] -> keep: bool[rows]")
def odd_and_short(answer: list[str], level: Tensor) -> Tensor:
    """Rows of an odd level with an answer of one character."""
    return (level % 2 == 1) & torch.tensor([len(a) == 1 for a in answer])


@op("answer: str[rows] -> keep: bool[rows]")
def crash(answer: list[str]) -> Tensor:
    """Ends its process."""
    os._exit(7)


@op("answer: str[rows] -> keep: f32[rows]")
def no_truth(answer: list[str]) -> Tensor:
    """No filter: it gives numbers."""
    return torch.ones(len(answer))
