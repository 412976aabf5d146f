"""Aggregation against means written out by hand."""

from __future__ import annotations

import statistics

import pytest
import torch

from hflow.ops.aggregate import token_weights

ROWS_OF_TOKENS = [[3.0, 1.0, 4.0, 1.0], [5.0], [], [9.0, 2.0]]


@pytest.mark.parametrize(
    "mode,expected",
    [
        ("token_mean", statistics.fmean([3, 1, 4, 1, 5, 9, 2])),
        ("sequence_mean", (9 / 4 + 5 + 11 / 2) / 3),
        ("sequence_sum", (9 + 5 + 11) / 3),
    ],
)
@pytest.mark.parametrize("parts", [[4], [1, 3], [1, 1, 1, 1]])
def test_aggregates_do_not_depend_on_how_the_minibatch_is_split(
    mode: str, expected: float, parts: list[int]
) -> None:
    total, start = 0.0, 0
    for size in parts:
        rows = ROWS_OF_TOKENS[start : start + size]
        start += size
        width = max(map(len, rows))
        losses = torch.tensor([row + [99.0] * (width - len(row)) for row in rows]).reshape(len(rows), width)
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows], dtype=torch.bool)
        mask = mask.reshape(len(rows), width)
        total += (token_weights(mask, mode, 7, 3) * losses).sum().item()
    assert total == pytest.approx(expected, rel=1e-6)


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_mean"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), "mean", 1, 1)
