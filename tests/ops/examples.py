"""A small batch with everything awkward in it: a hole, padding, a response of one token, an empty one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MASK = [
    [True, True, False, True, False],  # a tool wrote token 2; token 4 is padding
    [True, True, True, True, True],
    [False, False, True, False, False],
    [False, False, False, False, False],
]
LOGPROBS = [
    [-1.0, -0.3, -7.0, -2.0, 0.0],
    [-0.5, -4.0, -1.5, -0.1, -2.2],
    [-3.0, -3.0, -0.8, -3.0, 0.0],
    [-1.0, -1.0, -1.0, 0.0, 0.0],
]
OLD = [
    [-1.1, -0.9, -2.0, -1.0, 0.0],
    [-0.5, -3.9, -1.6, -0.9, -1.9],
    [-1.0, -2.0, -0.7, -1.0, 0.0],
    [-2.0, -1.0, -3.0, 0.0, 0.0],
]
REF = [
    [-0.8, -0.4, -1.0, -2.5, 0.0],
    [-0.6, -4.4, -1.0, -0.2, -2.0],
    [-1.0, -2.0, -1.3, -1.0, 0.0],
    [-2.0, -1.0, -3.0, 0.0, 0.0],
]
ROLLOUT = [
    [-1.0, -2.9, -2.0, -1.2, 0.0],
    [-0.6, -3.9, -1.4, -0.5, -2.9],
    [-1.0, -2.0, -1.7, -1.0, 0.0],
    [-2.0, -1.0, -3.0, 0.0, 0.0],
]
PER_ROW = [1.5, -0.7, -2.0, 3.0]
PER_TOKEN = [
    [1.5, 0.5, 9.0, 0.3, 0.0],
    [-0.7, 0.8, 0.0, -1.1, 0.4],
    [5.0, 5.0, -0.6, 5.0, 0.0],
    [4.0, 4.0, 4.0, 0.0, 0.0],
]
VALUES = [
    [0.4, -0.2, 7.0, 0.9, 3.0],
    [1.0, 0.5, -0.3, 0.2, -1.4],
    [7.0, 7.0, 0.6, 7.0, 0.0],
    [2.0, 2.0, 2.0, 0.0, 0.0],
]


def tensor(values: Sequence[object] | float) -> Tensor:
    """In float64, so that tests may compare with Python's floats to 1e-12."""
    return torch.tensor(values, dtype=torch.float64)


def mask() -> Tensor:
    return torch.tensor(MASK)


def cells() -> Iterator[tuple[int, int]]:
    """Every (row, column) of the batch."""
    return ((row, column) for row in range(len(MASK)) for column in range(len(MASK[0])))


def tokens(row: int) -> list[int]:
    """Columns of the row's tokens that count."""
    return [column for column, counts in enumerate(MASK[row]) if counts]
