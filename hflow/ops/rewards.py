"""Rewards that a rule can give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from hflow.ops.marks import last_marked
from hflow.ops.math_judge import math_judge
from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def exact_match(text: Sequence[Sequence[str]], answer: Sequence[str]) -> Tensor:
    """1 where a response is the answer, else 0; white space around either does not count.

    Args:
        text: for each of `rows` prompts, its k responses.
        answer: one per prompt.

    Returns:
        float32 ``[rows, k]``.
    """
    pairs = zip(text, answer, strict=True)
    scores = [[float(response.strip() == right.strip()) for response in row] for row, right in pairs]
    return torch.tensor(scores, dtype=torch.float32)


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def tagged_match(
    text: Sequence[Sequence[str]],
    answer: Sequence[str],
    *,
    open: str = "<answer>",
    close: str = "</answer>",
) -> Tensor:
    """1 where a response gives the answer between marks, else 0 (Search-R1, arXiv:2503.09516).

    What a response gives stands between its last `open` and the `close` after it; white space around it
    does not count. Where both are one mark, it opens and closes in turns.

    Args:
        text: for each of `rows` prompts, its k responses.
        answer: one per prompt.

    Returns:
        float32 ``[rows, k]``.

    Raises:
        ValueError: `open` or `close` is empty.
    """
    if not open or not close:
        raise ValueError("open and close are the marks around an answer; they cannot be empty")
    pairs = zip(text, answer, strict=True)
    scores = [
        [float(_given(response, open, close) == right.strip()) for response in row] for row, right in pairs
    ]
    return torch.tensor(scores, dtype=torch.float32)


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def math_verify(
    text: Sequence[Sequence[str]], answer: Sequence[str], *, timeout_s: Annotated[float, Gt(0)] = 5.0
) -> Tensor:
    """1 where what a response gives equals the answer as mathematics, else 0.

    Hugging Face's math-verify finds and compares the expressions, in a process of its own (see
    `hflow.ops.math_judge`). A response gives what it has in ``\\boxed``, in all of them together or in the
    last one; without any, its last expression. One that cannot be judged within `timeout_s` seconds scores 0.

    Args:
        text: for each of `rows` prompts, its k responses: LaTeX (``$...$``, ``\\boxed{...}``) or numbers.
        answer: one per prompt, LaTeX with or without ``$`` or ``\\boxed``.

    Returns:
        float32 ``[rows, k]``.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: an answer holds no expression, or `timeout_s` is not positive.
        RuntimeError: the process does not start.
    """
    judge = math_judge()
    pairs = zip(text, answer, strict=True)
    scores = [[float(judge.equal(response, right, timeout_s)) for response in row] for row, right in pairs]
    return torch.tensor(scores, dtype=torch.float32)


@op("text: str[rows] -> score: f32[rows]")
def format_match(text: Sequence[str], *, pattern: str) -> Tensor:
    """1 where the whole response matches a regular expression, else 0.

    Args:
        text: responses.
        pattern: of Python's `re`; begin it with ``(?s)`` to let ``.`` match line ends.

    Returns:
        float32 ``[rows]``.

    Raises:
        ValueError: `pattern` is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
    return torch.tensor([float(compiled.fullmatch(response) is not None) for response in text])


@op("text: str[rows*k], answer: str[rows], metadata: str[rows] -> score: f32[rows*k]")
def reasoning_gym(
    text: Sequence[Sequence[str]], answer: Sequence[str], metadata: Sequence[str], *, dataset: str
) -> Tensor:
    """The score that a reasoning-gym dataset itself gives to a response, from 0 to 1.

    Many of its tasks have more than one right answer, or give partial credit. White space around a
    response does not count.

    Args:
        text: for each of `rows` prompts, its k responses.
        answer: the row's `answer`, one per prompt.
        metadata: the row's `metadata` as JSON, one per prompt.
        dataset: its name in reasoning-gym, like ``countdown``.

    Returns:
        float32 ``[rows, k]``.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such dataset, or `metadata` is no JSON.
    """
    score = _gym_scorer(dataset)
    rows = zip(text, answer, metadata, strict=True)
    entries = [(row, {"answer": right, "metadata": _json(details)}) for row, right, details in rows]
    scores = [[score(response.strip(), entry) for response in row] for row, entry in entries]
    return torch.tensor(scores, dtype=torch.float32)


@op("score: f32[rows], other: f32[rows] -> score: f32[rows]")
def add(score: Tensor, other: Tensor, *, weight: float = 1.0) -> Tensor:
    """The sum of two scores: ``score + weight * other``.

    Args:
        score, other: ``[rows]``.

    Returns:
        ``[rows]``.
    """
    return score + weight * other


def _given(text: str, open_: str, close: str) -> str | None:
    found = last_marked(text, open_, close)
    return found[0].strip() if found else None


@cache
def _gym_scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ImportError:
        raise ImportError(
            "reasoning-gym is not installed: pip install -e '.[tasks]' in hflow's checkout"
        ) from None
    if dataset not in DATASETS:
        raise ValueError(f"reasoning-gym has no dataset `{dataset}`")
    return get_score_answer_fn(dataset)  # type: ignore[return-value]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"metadata is no JSON: {error}") from None
