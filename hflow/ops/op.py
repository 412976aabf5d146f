"""`@op`: gives a function the typed signature by which graph files use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def op(
    signature: str, *, whole_batch: bool = False, min_group: int = 1, needs: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Type a function that graph files may name as `fn:` or `loss:`.

    `signature` must be a string literal and the keywords literals too, because graph files are checked
    by reading them from the source (`hflow.graph.infer.functions`); positional parameters are its inputs,
    keyword-only ones are options. The function itself is returned unchanged, with all of it as
    ``__hflow_signature__``, ``__hflow_whole_batch__``, ``__hflow_min_group__`` and ``__hflow_needs__``.

    A function sees the rows of its device, groups being whole. With `whole_batch` it sees all rows of
    the batch, on every device: so it can take a mean over them, or return a scalar, ``f32[]``, that is
    the same everywhere.

    `min_group` is the least number of rows per group with which the function says anything, for those
    over groups, ``prompts*group``: what compares the responses to one prompt needs two.

    `needs` maps options to optional inputs: where such an option is not 0, its input must be wired.

    >>> @op("score: f32[prompts*group] -> spread: f32[prompts]", min_group=2)
    ... def spread(score):
    ...     return score.amax(1) - score.amin(1)
    >>> spread.__hflow_signature__
    'score: f32[prompts*group] -> spread: f32[prompts]'
    """

    def decorate(function: F) -> F:
        function.__hflow_signature__ = signature  # type: ignore[attr-defined]
        function.__hflow_whole_batch__ = whole_batch  # type: ignore[attr-defined]
        function.__hflow_min_group__ = min_group  # type: ignore[attr-defined]
        function.__hflow_needs__ = dict(needs or {})  # type: ignore[attr-defined]
        return function

    return decorate
