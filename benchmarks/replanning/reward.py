"""A reward that most texts differ in."""

from __future__ import annotations

from hflow.ops.op import op


@op("text: str[rows] -> score: f32[rows]")
def ones(text: list[str]) -> list[float]:
    """The share of characters that are a 1."""
    return [t.count("1") / max(1, len(t)) for t in text]
