"""The way of tokens to the experts that they have chosen, and back.

A token is copied once for each of its experts; copies are sorted by expert, so that an expert runs over one
slice. With expert parallelism the slices of other ranks' experts are exchanged by an all-to-all, as what the
experts made of them is afterwards (GShard, arXiv:2006.16668). No token is dropped, and none waits for room.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Dispatch:
    """Of the tokens of one pass through one layer. Collective over the ranks of `group`, which share the
    experts: each must make as many of them, and take `there` and `back` as often, forward and backward.

    `counts`: how many copies each expert of this rank gets, in their order.
    """

    def __init__(self, experts: Tensor, num_experts: int, group: dist.ProcessGroup):
        """`experts`: int64 ``[tokens, top_k]``, the choice of every token among the `num_experts` of the
        layer, of which each rank of `group` holds equally many, in its order."""
        self._group, self._top_k = group, experts.shape[1]
        copies = experts.flatten()
        self._sorted, self._unsorted = _sorting(copies)
        counts = torch.bincount(copies, minlength=num_experts).view(group.size(), -1)
        if group.size() == 1:
            self.counts: list[int] = counts[0].tolist()
            return
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._gives, self._gets = counts.sum(1).tolist(), arriving.sum(1).tolist()
        self.counts = arriving.sum(0).tolist()
        # They come rank by rank, and of each rank expert by expert.
        of = torch.arange(arriving.shape[1], device=experts.device).expand_as(arriving)
        self._grouped, self._ungrouped = _sorting(of.flatten().repeat_interleave(arriving.flatten()))

    def there(self, tokens: Tensor) -> Tensor:
        """Copies for this rank's experts ``[sum of counts, hidden]``, expert by expert, of this rank's tokens
        ``[tokens, hidden]`` and those of its peers."""
        copies = _Copy.apply(tokens, self._sorted, self._unsorted, self._top_k)
        if self._group.size() == 1:
            return copies
        received = _AllToAll.apply(_differentiable(copies), self._gives, self._gets, self._group)
        return _Permute.apply(received, self._grouped, self._ungrouped)

    def back(self, made: Tensor) -> Tensor:
        """What the experts made of this rank's tokens, ``[tokens, top_k, hidden]`` in the order of their
        choice, of what this rank's experts made of the copies."""
        if self._group.size() > 1:
            apart = _Permute.apply(_differentiable(made), self._ungrouped, self._grouped)
            made = _AllToAll.apply(apart, self._gets, self._gives, self._group)
        return _Permute.apply(made, self._unsorted, self._sorted).unflatten(0, (-1, self._top_k))


def _sorting(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The permutation that sorts `keys`, equal ones in their order, and its inverse."""
    there = keys.argsort(stable=True)
    back = torch.empty_like(there)
    back[there] = torch.arange(len(there), device=keys.device)
    return there, back


def _differentiable(rows: Tensor) -> Tensor:
    """With a gradient wherever gradients are computed: all ranks must take part in the exchange of the
    backward pass, also one whose rows came to experts, or from layers, that are frozen."""
    if rows.requires_grad or not torch.is_grad_enabled():
        return rows
    return rows.detach().requires_grad_()


class _Copy(torch.autograd.Function):
    """Rows `top_k` times each, sorted. torch would sum their gradients in no fixed order on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(back)
        ctx.top_k = top_k
        return rows.index_select(0, there // top_k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


class _AllToAll(torch.autograd.Function):
    """So many rows to each rank of a group, so many from each; gradients go the other way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, gives: list[int], gets: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.gives, ctx.gets, ctx.group = gives, gets, group
        return _exchanged(rows, gives, gets, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchanged(gradient, ctx.gets, ctx.gives, ctx.group), None, None, None


def _exchanged(rows: Tensor, gives: list[int], gets: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(gets), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), gets, gives, group=group)
    return received
