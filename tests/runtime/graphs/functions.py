"""What the graphs of this folder compute, simple enough to be computed again by hand in the tests."""

from __future__ import annotations

import zlib

from torch import Tensor

from hflow.ops.op import op


@op("text: str[rows] -> length: f32[rows]")
def length(text: list[str]) -> list[float]:
    return [float(len(t)) for t in text]


@op(
    "length: f32[rows], total: f32[], older: f32[] -> mean: f32[], total: f32[], twice: f32[]",
    whole_batch=True,
)
def running_total(length: Tensor, total: Tensor, older: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the mean length to the last step's total; the total of two steps ago only passes through."""
    return length.mean(), total + length.mean(), older


@op("score: f32[rows, resp~]<scored>, factor: f32[] -> score: f32[rows, resp~], scaled: f32[rows]")
def scale(score: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return score * factor, factor.expand(len(score))


@op("answer: str[batch] -> keep: bool[batch]")
def even(answer: list[str]) -> list[bool]:
    return [int(a) % 2 == 0 for a in answer]


@op("text: str[rows] -> checksum: f32[], whole: f32[]", whole_batch=True)
def seen(text: list[str]) -> tuple[float, float]:
    """A number that tells one list of texts from others, and how many there are."""
    return checksum(text), float(len(text))


def checksum(text: list[str]) -> float:
    """24 bits: what a float holds exactly."""
    return float(zlib.crc32("\n".join(text).encode()) & 0xFFFFFF)


@op("ours: f32[rows, resp~]<scored>, theirs: f32[rows, resp~]<scored> -> largest: f32[]", whole_batch=True)
def largest_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).abs().max()


@op("logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: f32[rows, resp~]")
def likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -logprobs * mask


@op(
    "logprobs: f32[pairs*k, resp~]<trained>, ref_logprobs: f32[pairs*k, resp~]<scored>, "
    "mask: bool[pairs*k, resp~] -> loss: f32[pairs]"
)
def preference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Direct preference optimisation (arXiv:2305.18290): the first row of a pair is better."""
    margin = ((logprobs - ref_logprobs) * mask).sum(-1)
    return (margin[:, 1] - margin[:, 0]).exp().log1p()


@op(
    "sampled: f32[rows, resp~]<behaviour>, scored: f32[rows, resp~]<scored>, versions: i32[rows, resp~], "
    "mask: bool[rows, resp~] -> newer: f32[], older: f32[], newest: f32[]",
    whole_batch=True,
)
def difference(
    sampled: Tensor, scored: Tensor, versions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean |difference| of log-probs, of the tokens that the newest weights sampled and of all others."""
    newest = versions[mask].max()
    found = (sampled - scored).abs()
    new, old = mask & (versions == newest), mask & (versions < newest)
    return found[new].mean(), found[old].sum() / old.sum().clamp(min=1), newest.float()


@op("text: str[rows] -> answer: str[rows]")
def first_digit(text: list[str]) -> list[str]:
    """Empty where there is none."""
    return [next((c for c in t if c.isdigit()), "") for t in text]


@op("finish: i32[rows] -> stopped: f32[rows]")
def seen_ends(finish: Tensor) -> Tensor:
    return (finish == 2).float()
