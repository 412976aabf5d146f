"""Functions that the files beside this one name; most of them wrongly made. Never imported."""

from typing import Any, Literal

from hflow.ops.op import op


@op("score: f32[rows] -> score: f32[rows]")
def identity(score: Any) -> Any:
    return score


@op("score f32[rows]")
def no_arrow(score: Any) -> Any:
    return score


@op("score: f32[rows] -> score: f32[rows, resp~]")
def dim_from_nowhere(score: Any) -> Any:
    return score


@op("score: f32[rows] -> score: f32[rows]")
def other_parameters(reward: Any) -> Any:
    return reward


@op("score: f32[rows] -> score: f32[rows]")
def option_without_kind(score: Any, *, scale: Any) -> Any:
    return score * scale


@op("score: f32[rows] -> score: f32[rows]")
def scaled(score: Any, *, scale: float, mode: Literal["up", "down"] = "up") -> Any:
    return score * scale


def untyped(score: Any) -> Any:
    return score


@op("logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: f32[rows]")
def loss_per_row(logprobs: Any, mask: Any) -> Any:
    return (logprobs * mask).sum(1)


@op("logprobs: f32[rows, resp~]<trained> -> total: f32[rows, resp~]")
def trained_in_a_call(logprobs: Any) -> Any:
    return logprobs


@op("tokens: i32[rows, seq~], other: f32[rows, resp~], mask: bool[rows, resp~] -> score: f32[rows]")
def two_texts(tokens: Any, other: Any, mask: Any) -> Any:
    return (other * mask).sum(1)


@op("score: f32[rows], mask: bool[rows, resp~] -> spread: f32[rows, resp~]")
def needs_mask(score: Any, mask: Any) -> Any:
    return score[:, None] * mask


@op("logprobs: f32[rows, resp~]<scored>, mask: bool[rows, resp~] -> total: f32[rows]")
def scored_only(logprobs: Any, mask: Any) -> Any:
    return (logprobs * mask).sum(1)
