"""Writes down what a reward model said, so that tests can ask another implementation."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from hflow.ops.op import op


@op(
    "tokens: i32[rows, seq~], mask: bool[rows, resp~], prompt: i32[rows, prompt~], score: f32[rows] "
    "-> seen: f32[rows]"
)
def record(tokens: Tensor, mask: Tensor, prompt: Tensor, score: Tensor, *, file: str) -> Tensor:
    """Append tokens and score of every row to `file`. No prompt holds the padding token, 0."""
    lengths = (prompt != 0).sum(1) + mask.sum(1)
    with Path(file).open("a") as out:
        for row, length, value in zip(tokens.tolist(), lengths.tolist(), score.tolist()):
            out.write(json.dumps({"tokens": row[:length], "score": value}) + "\n")
    return score
