"""Dropout that is the same under every plan: it follows from numbers, and not from an order of draws.

(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011: random numbers by counter.) Every input
of a matrix has a number of its own: of the update, the row and the position of its token; and of the layer,
the matrix and its column. A hash of both says whether it is dropped. So a rank makes the mask of what it has,
whatever the others have, and recomputation and the backward pass make it again: no mask is kept.

Rows with one prompt share its hidden states, and so what is dropped of them: the number of a token of a
prompt follows from the prompt's tokens, and not from the row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.products import product, projected
from hflow.runtime.rows import length_mask

CHUNK_ELEMENTS = 2**20  # whose mask is made at once
_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd, and far from any pattern: 2**64 divided by the golden ratio
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)  # of SplitMix64
_SHORT_MIX = (16, 0x7FEB352D), (15, 0x846CA68B - 2**32)  # as good, of 32 bits (Wellons, lowbias32)


def numbered(*parts: object) -> int:
    """A number of 64 bits that follows from the given names and numbers."""
    named = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(named[:8], "little", signed=True)


def token_draws(tokens: Tensor, prompts: Tensor, rows: Tensor, seed: int) -> Tensor:
    """The number of each token of an update, int64 ``[rows, longest]``.

    Args:
        tokens: int64 ``[rows, longest]``; prompts: int64 ``[rows]``, how many of a row's are its prompt.
        rows: int64 ``[rows]``, their global numbers.
        seed: of the update.
    """
    at = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = length_mask(prompts, tokens.shape[1])
    of_prompt = mixed(tokens + _STEP * at).where(in_prompt, 0).sum(1)
    owner = torch.where(in_prompt, of_prompt[:, None], mixed(rows)[:, None])
    return mixed(mixed(owner + seed) + _STEP * at)


def column_draws(matrix: int, first: int, count: int, device: torch.device) -> Tensor:
    """The numbers of `count` columns of a matrix, from the `first` on, int32 ``[count]``."""
    columns = torch.arange(first, first + count, device=device)
    return mixed(matrix + _STEP * columns).to(torch.int32)


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's function of int64 numbers (Steele et al., OOPSLA 2014): each of their bits changes half of
    its bits."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, without its sign."""
    return (x >> by) & (1 << 64 - by) - 1


def kept(tokens: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """Which inputs of a matrix stay, bool ``[tokens, columns]``: each but with probability `dropout`."""
    found = tokens.to(torch.int32)[:, None] + columns
    for shift, factor in _SHORT_MIX:
        found.bitwise_xor_((found >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    found.bitwise_xor_((found >> 16).bitwise_and_(0xFFFF))
    return found.bitwise_and_(0x7FFFFFFF) >= round(dropout * 2**31)


def dropped_product(x: Tensor, weight: Tensor, draws: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """``x W^T`` of what stays of x, which counts 1 / (1 - dropout) times. Nothing but x is kept.

    Args:
        x: ``[tokens, ..., columns]``, of one batch; weight: ``[rows, columns]``.
        draws: of the tokens, int64; columns: of the columns, int32.
    """
    return _DroppedProduct.apply(x, weight, draws, columns, dropout)


class _DroppedProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, draws: Tensor, columns: Tensor, dropout: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, draws, columns)
        ctx.dropout = dropout
        found = x.new_empty(*x.shape[:-1], len(weight))
        flat, wide = found.view(-1, len(weight)), x.reshape(-1, x.shape[-1])
        for part in _chunks(wide):
            mask = kept(draws[part], columns, dropout)
            flat[part] = projected(wide[part] * mask, weight).div_(1 - dropout)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, draws, columns = ctx.saved_tensors
        wide, upstream = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, len(weight)) / (1 - ctx.dropout)
        to_weight = torch.zeros(weight.shape, device=x.device)
        to_x = torch.empty_like(wide) if ctx.needs_input_grad[0] else None
        for part in _chunks(wide):
            mask = kept(draws[part], columns, ctx.dropout)
            to_weight += product(upstream[part].T, wide[part] * mask)
            if to_x is not None:
                torch.mul(product(upstream[part], weight), mask, out=to_x[part])
        of_x = None if to_x is None else to_x.view(x.shape)
        return of_x, to_weight.to(weight.dtype), None, None, None


def _chunks(wide: Tensor) -> list[slice]:
    """Consecutive tokens, whose masks are made one after the other."""
    size = max(1, CHUNK_ELEMENTS // wide.shape[1])
    return [slice(start, start + size) for start in range(0, len(wide), size)]
