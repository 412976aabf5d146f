"""Rewards that also random texts get, so that there is something to learn."""

from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text: list[list[str]], answer: list[str]) -> list[list[float]]:
    """The share of characters that are digits of the answer."""
    return [[sum(c in a for c in t) / max(1, len(t)) for t in samples] for samples, a in zip(text, answer)]
