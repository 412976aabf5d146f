"""Functions of the exhibits: each does what a program did."""

from __future__ import annotations

from hflow.ops.op import op


@op("tokens: i32[rows, seq~], text: str[rows] -> again: i32[rows, seq~]")
def retokenise(tokens, text):
    """Make tokens of sampled texts, as a chat endpoint does when it is given the conversation so far."""
    raise NotImplementedError("a graph with this is refused before anything runs")


@op("text: str[rows] -> score: f32[rows]")
def never_ends(text):
    """Search an answer that is not there."""
    while True:
        pass


@op("text: str[rows] -> score: f32[rows]")
def not_a_number(text):
    """Divide by the length of an empty answer."""
    return [float("nan") for _ in text]
