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


@op("logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: bool[rows]")
def loss_without_gradient(logprobs: Any, mask: Any) -> Any:
    return (logprobs * mask).sum(1) > 0


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


@op("score: f32[rows] -> mean: f32[]")
def mean_of_a_part(score: Any) -> Any:
    return score.mean()


@op("score: f32[rows] -> mean: f32[]", whole_batch=True)
def mean(score: Any) -> Any:
    return score.mean()


@op("score: f32[rows], scale: f32[] -> score: f32[rows]")
def scaled_by(score: Any, scale: Any) -> Any:
    return score * scale


@op("text: str[rows], before: str[rows] -> text: str[rows]")
def joined(text: Any, before: Any) -> Any:
    return [a + b for a, b in zip(before, text)]


@op("score: f32[rows] -> keep: bool[rows]")
def positive(score: Any) -> Any:
    return score > 0


@op("logprobs: f32[rows, resp~], mask: bool[rows, resp~] -> total: f32[rows]")
def plain_sum(logprobs: Any, mask: Any) -> Any:
    return (logprobs * mask).sum(1)


@op("logprobs: f32[rows, resp~]<trained>, entropy?: f32[rows, resp~]<trained> -> loss: f32[rows, resp~]")
def entropy_without_coef(logprobs: Any, entropy: Any = None) -> Any:
    return logprobs - entropy


@op("logprobs: f32[rows, resp~]<trained> -> loss: f32[rows, resp~]", whole_batch=True)
def loss_of_the_batch(logprobs: Any) -> Any:
    return logprobs - logprobs.mean()


@op("logprobs: f32[rows, resp~]<trained>, scale: f32[] -> loss: f32[rows, resp~]")
def loss_with_a_scalar(logprobs: Any, scale: Any) -> Any:
    return logprobs * scale


@op("logprobs: f32[rows, resp~]<trained> -> loss: f32[rows, resp~]")
def loss_with_an_option_of_the_node(logprobs: Any, *, lr: float = 1.0) -> Any:
    return logprobs * lr


@op(
    "values: f32[rows, resp~], limit: f32[], mask: bool[rows, resp~] "
    "-> values: f32[rows, resp~], limit: f32[]",
    whole_batch=True,
)
def held_back(values: Any, limit: Any, mask: Any) -> Any:
    return values.clamp(max=limit) * mask, values.amax()


@op("score: f32[rows], limit: f32[], mask: bool[rows, resp~] -> limit: f32[]", whole_batch=True)
def limit_by_mask(score: Any, limit: Any, mask: Any) -> Any:
    return limit + (score[:, None] * mask).mean()


@op("first: f32[rows, resp~]<value>, second: f32[rows, resp~]<value> -> values: f32[rows, resp~]")
def lower(first: Any, second: Any) -> Any:
    return first.minimum(second)


@op("first: f32[rows, resp~]<value>, second: f32[rows, resp~]<value> -> values: f32[rows, resp~]<mixed>")
def lower_of_two(first: Any, second: Any) -> Any:
    return first.minimum(second)


@op("numbers: f32[rows, resp~] -> half: f32[rows, resp~], keep: bool[rows, resp~], total: f32[rows]")
def halved(numbers: Any) -> Any:
    return numbers / 2, numbers > 0, numbers.sum(1)


@op("values: f32[rows, resp~]<trained>, returns: f32[rows, resp~] -> loss: f32[rows, resp~]")
def squared_error(values: Any, returns: Any) -> Any:
    return (values - returns).square()


@op("a: f32[rows, resp~]<behaviour>, b: f32[rows, resp~]<scored>, mask: bool[rows, resp~] -> gap: f32[rows]")
def log_prob_gap(a: Any, b: Any, mask: Any) -> Any:
    return ((a - b) * mask).sum(1)


@op("level: i64[rows] -> keep: bool[rows]")
def easy(level: Any) -> Any:
    return level < 3


@op("tokens: i32[rows, seq~], text: str[rows] -> again: i32[rows, seq~]")
def retokenise(tokens: Any, text: Any) -> Any:
    return tokens
