"""`@op`: gives a function the typed signature by which graph files use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def op(signature: str) -> Callable[[F], F]:
    """Type a function that graph files may name as `fn:` or `loss:`.

    `signature` must be a string literal, because graph files are checked by reading it from the
    source (`hflow.graph.functions`); positional parameters are its inputs, keyword-only ones are
    options. The function itself is returned unchanged, with the text as ``__hflow_signature__``.

    >>> @op("score: f32[prompts*group] -> best: f32[prompts]")
    ... def best_of_group(score):
    ...     return score.max(dim=1).values
    >>> best_of_group.__hflow_signature__
    'score: f32[prompts*group] -> best: f32[prompts]'
    """

    def decorate(function: F) -> F:
        function.__hflow_signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate
