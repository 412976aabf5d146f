"""Tokens of a pack at their places in rows, and back: the gradients of both, without atomic sums.

Torch's gradient of `index_select` adds up in the tensor's dtype and, on CUDA, in any order. Here most of it
is a selection, too: all tokens but those of shared prompts are in one row. What further rows have of a token
is added in float32, and always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

AT_ONCE = 8192  # further places, whose gradients are copied to float32


@dataclass(frozen=True)
class Gather:
    """Where tokens are in some rows, read one after the other.

    Attributes:
        at: int64 ``[all places of rows]``: the token at each, any where there is none.
        found_at: int64 ``[all tokens]``: the place that counts as a token's own.
        tokens: how many have a place; those after them belong to no row.
        more_at, more: int64: the further places of tokens, and these tokens.
    """

    at: Tensor
    found_at: Tensor
    tokens: int
    more_at: Tensor
    more: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """``[all places of rows, …]`` of ``[all tokens, …]``."""
        return _ToRows.apply(x, self)

    def back(self, x: Tensor) -> Tensor:
        """``[all tokens, …]`` of ``[all places of rows, …]``: what is at each token's own place."""
        return _FromRows.apply(x, self)

    def padded(self, tokens: int) -> Gather:
        """With so many tokens, of which the last have no place."""
        return replace(self, found_at=pad(self.found_at, (0, tokens - len(self.found_at))))

    @property
    def own(self) -> Tensor:
        """int64 ``[tokens]``, the places of those that have one."""
        return self.found_at[: self.tokens]


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:  # type: ignore[override]
        ctx.gather = gather
        return x.index_select(0, gather.at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gather: Gather = ctx.gather
        found = gradient.index_select(0, gather.own)
        if len(gather.more):
            total = found.to(torch.promote_types(found.dtype, torch.float32))
            for at, tokens in zip(gather.more_at.split(AT_ONCE), gather.more.split(AT_ONCE)):
                _add(total, tokens, gradient.index_select(0, at).to(total.dtype))
            found = total.to(found.dtype)
        rest = len(gather.found_at) - gather.tokens
        return (torch.cat([found, found.new_zeros(rest, *found.shape[1:])]) if rest else found), None


class _FromRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:  # type: ignore[override]
        ctx.gather, ctx.places = gather, len(x)
        return x.index_select(0, gather.found_at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gather: Gather = ctx.gather
        found = gradient.new_zeros(ctx.places, *gradient.shape[1:])
        return found.index_copy_(0, gather.own, gradient[: gather.tokens]), None


def _add(total: Tensor, at: Tensor, values: Tensor) -> None:
    """Add `values` to some rows of `total`, in the order in which they come."""
    if total.is_cuda:  # there `index_add_` is atomic, and this sorts first
        total.index_put_((at,), values, accumulate=True)
    else:
        total.index_add_(0, at, values)
