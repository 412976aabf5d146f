"""`@op`: gives a function the typed signature by which graph files use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def op(signature: str, *, whole_batch: bool = False) -> Callable[[F], F]:
    """Type a function that graph files may name as `fn:` or `loss:`.

    `signature` must be a string literal and `whole_batch` a literal too, because graph files are
    checked by reading them from the source (`hflow.graph.functions`); positional parameters are its
    inputs, keyword-only ones are options. The function itself is returned unchanged, with the two as
    ``__hflow_signature__`` and ``__hflow_whole_batch__``.

    A function sees the rows of its device, groups being whole. With `whole_batch` it sees all rows of
    the batch, on every device: so it can take a mean over them, or return a scalar, ``f32[]``, that is
    the same everywhere.

    >>> @op("score: f32[prompts*group] -> best: f32[prompts]")
    ... def best_of_group(score):
    ...     return score.max(dim=1).values
    >>> best_of_group.__hflow_signature__
    'score: f32[prompts*group] -> best: f32[prompts]'
    """

    def decorate(function: F) -> F:
        function.__hflow_signature__ = signature  # type: ignore[attr-defined]
        function.__hflow_whole_batch__ = whole_batch  # type: ignore[attr-defined]
        return function

    return decorate
