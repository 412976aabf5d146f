"""Attention whose scores are made in memory, because torch's fused kernels know neither soft caps nor sinks.

With a cap c a score is c tanh(q kᵀ / (c sqrt(d))) (arXiv:2408.00118, section 2). With sinks each head has
one more score, learned, of a token whose value is zero (arXiv:2309.17453; gpt-oss, arXiv:2508.10925): it only
adds to the softmax's denominator.

Scores are made of as few queries at a time as `hflow.plan.scores` says, and again in the backward pass:
memory grows with the length, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from hflow.plan.scores import queries_at_once
from hflow.runtime.engines.megatron.attention import FusedAttention, band
from hflow.runtime.engines.megatron.present_device import current_device
from hflow.runtime.engines.megatron.products import product
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig


class ExplicitAttention(FusedAttention):
    """Megatron's core attention of models with an `attention_cap` or `sinks`: of these the part of this rank,
    ``[heads / tp]``."""

    def __init__(self, config: ShapedConfig, layer_number: int, **options: Any):
        super().__init__(config, layer_number, **options)
        self.sinks: torch.nn.Parameter | None = None
        if config.shape.sinks:
            heads = config.shape.num_heads // config.groups.tp.size()
            memory = torch.empty(heads, dtype=config.params_dtype, device=current_device())
            self.sinks = torch.nn.Parameter(memory)
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_explicitly(query, key, value, self.shape.attention_cap, self.sinks, self.window)


def attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    present: Tensor | None = None,
) -> Tensor:
    """Attention of ``[rows, heads, tokens, d]`` to keys and values of as many heads or fewer, of every token
    to itself and those before it, ``window - 1`` of them at most.

    Args:
        query: those of the last tokens, of all that have keys.
        sinks: ``[heads]``.
        present: bool ``[rows, tokens]``, False where there is padding, which only sees itself.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # the heads that share a key
    sinks = None if sinks is None else sinks.view(key.shape[1], -1)
    return _ExplicitAttention.apply(grouped, key, value, sinks, _Sight(cap, window, present)).flatten(1, 2)


def attend_explicitly_newest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
    present: Tensor | None = None,
) -> Tensor:
    """Attention of one token, ``[rows, groups, heads, d]``, to all keys that are `present`, bool
    ``[rows, keys]``; `sinks`: ``[groups * heads]``."""
    scores = _scores(query, key, cap)
    scores = scores if cap is None else scores.mul_(cap)
    if present is not None:
        scores = scores.masked_fill_(~present[:, None, None], -torch.inf)
    weights, _ = _softmax(scores, None if sinks is None else sinks.view(*query.shape[1:3], 1))
    return product(weights.to(value.dtype), value)


@dataclass(frozen=True)
class _Sight:
    """What a query sees, and by which cap; see `attend_explicitly`."""

    cap: float | None
    window: int | None
    present: Tensor | None


@dataclass(frozen=True)
class _Part:
    """Some queries of some rows, and the keys that they may see."""

    rows: slice
    queries: slice
    keys: slice


@dataclass(frozen=True)
class _Weights:
    """Of some queries. `weights`: the softmax, ``[rows, groups, heads, queries, keys]``; `tanh`: that of the
    scores by the cap, the same shape; `of_sinks`: what the sinks have of the softmax, ``[…, queries, 1]``."""

    weights: Tensor
    tanh: Tensor | None
    of_sinks: Tensor | None


class _ExplicitAttention(torch.autograd.Function):
    """Of queries ``[rows, groups, heads, last tokens, d]``, keys and values ``[rows, groups, tokens, d]``,
    sinks ``[groups, heads]``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, sight: _Sight
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.sight = sight
        found = query.new_empty(query.shape)
        for part in _parts(query, key, sight.window):
            found[part.rows, :, :, part.queries] = _found(query, key, value, sinks, sight, part)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = ctx.saved_tensors  # which recomputation unpacks once
        query, key, value, sinks = given
        wide = torch.promote_types(key.dtype, torch.float32)
        to_key, to_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        to_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        into = _AttentionGradients(torch.empty_like(query), to_key, to_value, to_sinks)
        for part in _parts(query, key, ctx.sight.window):
            _add_gradients(into, given, ctx.sight, part, gradient)
        of_sinks = None if to_sinks is None else to_sinks.to(query.dtype)
        return into.query, to_key.to(key.dtype), to_value.to(value.dtype), of_sinks, None


@dataclass(frozen=True)
class _AttentionGradients:
    """Of queries, whose parts are written, and of keys, values and sinks, where parts are added."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


# What follows is a function for each part, so that a part's scores are gone when the next part's are made.


def _found(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, sight: _Sight, part: _Part
) -> Tensor:
    weights = _weights(query, key, sinks, sight, part).weights
    here = product(weights.flatten(2, 3).to(value.dtype), value[part.rows, :, part.keys])
    return here.unflatten(2, weights.shape[2:4])


def _add_gradients(
    into: _AttentionGradients, given: tuple[Tensor, ...], sight: _Sight, part: _Part, gradient: Tensor
) -> None:
    query, key, value, sinks = given
    at = part.rows, slice(None), part.keys
    made = _weights(query, key, sinks, sight, part)
    to_found = gradient[part.rows, :, :, part.queries].flatten(2, 3)
    into.value[at] += product(made.weights.flatten(2, 3).to(value.dtype).transpose(-1, -2), to_found)
    to_weights = product(to_found, value[at].transpose(-1, -2)).to(into.key.dtype).view_as(made.weights)
    mean = (to_weights * made.weights).sum(-1, keepdim=True)
    if into.sinks is not None and made.of_sinks is not None:  # whose value is zero
        into.sinks.sub_((mean * made.of_sinks).sum((0, 3, 4)))
    through = to_weights.sub_(mean).mul_(made.weights)
    if made.tanh is not None:
        through.mul_(made.tanh.square_().neg_().add_(1))
    scores = through.mul_(1 / sqrt(query.shape[-1])).flatten(2, 3).to(query.dtype)
    here = product(scores, key[at])
    into.query[part.rows, :, :, part.queries] = here.unflatten(2, made.weights.shape[2:4])
    into.key[at] += product(scores.transpose(-1, -2), query[part.rows, :, :, part.queries].flatten(2, 3))


def _parts(query: Tensor, key: Tensor, window: int | None) -> Iterator[_Part]:
    rows, groups, heads, length, _ = query.shape
    some, side = queries_at_once(rows, groups * heads, key.shape[2])
    before = key.shape[2] - length
    for row in range(0, rows, some):
        for start in range(0, length, side):
            stop = min(start + side, length)
            first = 0 if window is None else max(0, before + start - window + 1)
            yield _Part(slice(row, row + some), slice(start, stop), slice(first, before + stop))


def _weights(query: Tensor, key: Tensor, sinks: Tensor | None, sight: _Sight, part: _Part) -> _Weights:
    some = query[part.rows, :, :, part.queries]
    scores = _scores(some.flatten(2, 3), key[part.rows, :, part.keys], sight.cap)
    scores = scores.unflatten(2, some.shape[2:4])
    present = None if sight.present is None else sight.present[part.rows, part.keys]
    before = scores.shape[-1] - some.shape[3]  # keys, of a part, before the first query's own
    mask = band(sight.window, some.shape[3], before, scores, present)
    mask = mask if present is None else mask[:, :, None]
    tanh = None if sight.cap is None else scores
    summed = scores.add_(mask) if sight.cap is None else (scores * sight.cap).add_(mask)
    weights, of_sinks = _softmax(summed, None if sinks is None else sinks[:, :, None, None])
    return _Weights(weights, tanh, of_sinks)


def _scores(query: Tensor, key: Tensor, cap: float | None) -> Tensor:
    """Of ``[..., queries, d]`` and ``[..., keys, d]``, in float32 at least; with a cap the tanh of scores by
    the cap, which are not kept."""
    scores = product(query, key.transpose(-1, -2))
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if cap is None:
        return wide.div_(sqrt(query.shape[-1]))
    return wide.div_(sqrt(query.shape[-1]) * cap).tanh_()


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Over the last dim of scores, which are overwritten, and of sinks that fit them with one score each; and
    what the sinks have of it."""
    if sinks is None:
        return scores.softmax(-1), None
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks.to(scores.dtype))
    weights, of_sinks = scores.sub_(most).exp_(), (sinks - most).exp_()
    total = weights.sum(-1, keepdim=True).add_(of_sinks)
    return weights.div_(total), of_sinks.div_(total)
