"""Attention whose scores are soft-capped before the softmax: a = softmax(c tanh(q kᵀ / (c sqrt(d))) + mask).

torch's fused kernels cap nothing. So scores are made here, of as few queries at a time as
`hflow.plan.scores` says, and again in the backward pass: memory grows with the length, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hflow.plan.scores import queries_at_once
from hflow.runtime.engines.megatron.attention import FusedAttention, band


class CappedAttention(FusedAttention):
    """Megatron's core attention of models with an `attention_cap`."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.shape.attention_cap
        return attend_capped(self.shape.attention_cap, query, key, value, self.window)


def attend_capped(
    cap: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None = None,
    present: Tensor | None = None,
) -> Tensor:
    """Attention of ``[rows, heads, tokens, d]`` to keys and values of as many heads or fewer, of every token
    to itself and those before it, ``window - 1`` of them at most.

    Args:
        present: bool ``[rows, tokens]``, False where there is padding, which only sees itself.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # the heads that share a key
    return _CappedAttention.apply(grouped, key, value, cap, window, present).flatten(1, 2)


def attend_capped_newest(
    cap: float, query: Tensor, key: Tensor, value: Tensor, present: Tensor | None
) -> Tensor:
    """Attention of one token, ``[rows, groups, heads, d]``, to all keys that are `present`, bool
    ``[rows, keys]``."""
    scores = _tanh_of_scores(query, key, cap).mul_(cap)
    if present is not None:
        scores = scores.masked_fill_(~present[:, None, None], -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


@dataclass(frozen=True)
class _Part:
    """Some queries of some rows, and the keys that they may see."""

    rows: slice
    queries: slice
    keys: slice


class _CappedAttention(torch.autograd.Function):
    """Of queries ``[rows, groups, heads, tokens, d]``, keys and values ``[rows, groups, tokens, d]``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cap: float,
        window: int | None,
        present: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.cap, ctx.window, ctx.present = cap, window, present
        found = query.new_empty(query.shape)
        for part in _parts(query, window):
            _, weights = _weights(query, key, cap, window, present, part)
            here = weights.flatten(2, 3).to(value.dtype) @ value[part.rows, :, part.keys]
            found[part.rows, :, :, part.queries] = here.unflatten(2, weights.shape[2:4])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        to_query = torch.empty_like(query)
        wide = torch.promote_types(key.dtype, torch.float32)
        to_key, to_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for part in _parts(query, ctx.window):
            at = part.rows, slice(None), part.keys
            tanh, weights = _weights(query, key, ctx.cap, ctx.window, ctx.present, part)
            to_found = gradient[part.rows, :, :, part.queries].flatten(2, 3)
            to_value[at] += weights.flatten(2, 3).to(value.dtype).transpose(-1, -2) @ to_found
            to_weights = (to_found @ value[at].transpose(-1, -2)).to(wide).view_as(weights)
            through = to_weights.sub_((to_weights * weights).sum(-1, keepdim=True)).mul_(weights)
            to_scores = through.mul_(tanh.square_().neg_().add_(1)).mul_(1 / sqrt(query.shape[-1]))
            scores = to_scores.flatten(2, 3).to(query.dtype)
            here = scores @ key[at]
            to_query[part.rows, :, :, part.queries] = here.unflatten(2, weights.shape[2:4])
            to_key[at] += scores.transpose(-1, -2) @ query[part.rows, :, :, part.queries].flatten(2, 3)
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None, None


def _parts(query: Tensor, window: int | None) -> Iterator[_Part]:
    rows, groups, heads, length, _ = query.shape
    some, side = queries_at_once(rows, groups * heads, length)
    for row in range(0, rows, some):
        for start in range(0, length, side):
            stop = min(start + side, length)
            first = 0 if window is None else max(0, start - window + 1)
            yield _Part(slice(row, row + some), slice(start, stop), slice(first, stop))


def _weights(
    query: Tensor, key: Tensor, cap: float, window: int | None, present: Tensor | None, part: _Part
) -> tuple[Tensor, Tensor]:
    """tanh of the scores by the cap, and the softmax, ``[rows, groups, heads, queries, keys]`` each."""
    some = query[part.rows, :, :, part.queries]
    tanh = _tanh_of_scores(some.flatten(2, 3), key[part.rows, :, part.keys], cap)
    tanh = tanh.unflatten(2, some.shape[2:4])
    here = None if present is None else present[part.rows, part.keys]
    before = part.queries.start - part.keys.start
    mask = band(window, some.shape[3], before, tanh, here)
    mask = mask if here is None else mask[:, :, None]
    return tanh, (tanh * cap).add_(mask).softmax(-1)


def _tanh_of_scores(query: Tensor, key: Tensor, cap: float) -> Tensor:
    """Of scores, which are not kept, in float32 at least: of ``[..., queries, d]`` and ``[..., keys, d]``."""
    scores = query @ key.transpose(-1, -2)
    return (
        scores.to(torch.promote_types(scores.dtype, torch.float32)).div_(sqrt(query.shape[-1]) * cap).tanh_()
    )
