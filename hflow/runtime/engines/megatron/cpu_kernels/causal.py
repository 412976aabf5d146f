"""Attention of the rows of a pack, and its gradient: prompts that rows share are taken once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call, runs_on
from hflow.runtime.engines.megatron.prompt_groups import PromptGroups


def is_parallel(groups: PromptGroups, key: Tensor) -> bool:
    """Whether there is work for all threads: one takes the rows of a prompt with one key head."""
    return len(groups) * key.shape[1] >= torch.get_num_threads()


def attend_causally(
    query: Tensor, key: Tensor, value: Tensor, groups: PromptGroups, window: int | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v of ``[places, heads, d]``, keys and values of as many heads or fewer, of each
    token of a row with those before it and itself; 0 at places that belong to no row.

    Args:
        window: how many tokens, with itself, a token sees; None: all.
    """
    assert key.shape == value.shape and key.shape[::2] == query.shape[::2] and len(query) >= groups.tokens
    assert runs_on(query, key) and runs_on(key, value)
    return _Attention.apply(query, key, value, groups, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: PromptGroups, window: int | None
    ) -> Tensor:
        given = query.contiguous(), key.contiguous(), value.contiguous()  # without what they are parts of
        found, log_sums = _empty(query, groups), torch.empty(query.shape[:2], dtype=torch.float32)
        call("causal", query, *given, found, log_sums, *_sizes(query, key, groups, window))
        ctx.save_for_backward(*given, found, log_sums)
        ctx.groups, ctx.window = groups, window
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, found, log_sums = ctx.saved_tensors
        into = [_empty(x, ctx.groups) for x in (query, key, value)]
        given = upstream.contiguous(), query, key, value, found, log_sums
        call("causal_gradient", query, *given, *into, *_sizes(query, key, ctx.groups, ctx.window))
        return *into, None, None


def _empty(like: Tensor, groups: PromptGroups) -> Tensor:
    """To be written where there are tokens, 0 elsewhere; contiguous."""
    make = torch.empty if len(like) == groups.tokens else torch.zeros
    return make(like.shape, dtype=like.dtype)


def _sizes(query: Tensor, key: Tensor, groups: PromptGroups, window: int | None) -> tuple[Tensor | int, ...]:
    pairs, width = key.shape[1:]
    shape = pairs, query.shape[1] // pairs, width, window or 0
    return groups.rows, groups.starts, len(groups), max(groups.longest, 1), *shape
