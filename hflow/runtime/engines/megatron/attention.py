"""Attention by torch's fused kernel, behind Megatron's core-attention interface.

Megatron's local attention makes every score matrix in memory and takes its work buffer from a global;
the fused kernel does neither. Queries and keys turn here by rotary angles that all layers share: Megatron
would find their sines and cosines anew in each, and copy queries and keys six times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hflow.runtime.engines.megatron.context_shard import ContextShard
from hflow.runtime.engines.megatron.cpu_kernels.causal import attend_causally, is_parallel
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on
from hflow.runtime.engines.megatron.moe.routes import RoutedTokens
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig

CHUNK = 512  # queries that look through a window at once
TURN = 128  # queries that see all tokens before them at once, where they need a mask for that


@dataclass(frozen=True)
class TokenPlaces:
    """What layers know of the tokens: the rows that they make up, and how each turns by its position.
    `windowed`: how it turns in layers with a window, where it does so by other angles there. `routed`: what
    routers are told; None: there are none. `read`: int64, the places that the last layer's MLP runs at; None:
    all."""

    pack: Pack | ContextShard
    rotation: Rotation
    windowed: Rotation | None = None
    routed: RoutedTokens | None = None
    read: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Fused attention of ``[rows, heads, tokens, d]`` to keys and values of as many heads or fewer; causal
    without a mask.

    On CUDA torch's fused kernels take fewer heads in half precision and without a mask of numbers only; else
    it would make all scores in memory, so that keys and values are repeated first.
    """
    shared = query.shape[1] // key.shape[1]
    numbers = mask is not None and not isinstance(mask, CausalBias)
    if shared > 1 and query.is_cuda and (numbers or query.dtype == torch.float32):
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        shared = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shared > 1
    )


def attend_within(
    window: int, query: Tensor, key: Tensor, value: Tensor, present: Tensor | None = None
) -> Tensor:
    """Attention of every token to itself and the ``window - 1`` tokens before it; see `attend`.

    Queries take turns, `CHUNK` of them at a time with the keys that these can see: memory grows with the
    length, not with its square.

    Args:
        query: those of the last tokens, of all that have keys.
        present: bool ``[rows, tokens]``, False where there is padding, which only sees itself.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    found: list[Tensor] = []
    masks: dict[tuple[int, int], Tensor] = {}  # most chunks have the same one, and autograd keeps it
    for start in range(0, length, CHUNK):
        stop, at = min(start + CHUNK, length), before + start
        first = max(0, at - window + 1)
        seen = slice(first, before + stop)
        mask = masks.get((stop - start, at - first))
        if present is not None:  # each is another one
            mask = band(window, stop - start, at - first, query, present[:, seen])
        elif mask is None:
            mask = masks[stop - start, at - first] = band(window, stop - start, at - first, query, None)
        found.append(attend(query[:, :, start:stop], key[:, :, seen], value[:, :, seen], mask))
    return torch.cat(found, 2)


def attend_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last tokens, ``[rows, heads, queries, d]``, to all up to each, which have keys and
    values ``[rows, heads or fewer, tokens, d]``.

    On CUDA the fused kernels know where the last queries stand. Elsewhere queries take turns with masks that
    are made again for the backward pass: kept, they would grow with the square of the length.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    if not before:
        return attend(query, key, value)
    if query.is_cuda:
        return attend(query, key, value, causal_lower_right(length, key.shape[2]))
    found: list[Tensor] = []
    for start in range(0, length, TURN):
        stop = min(start + TURN, length)
        parts = (x[:, :, : before + stop] for x in (key, value))
        turn = checkpoint(_turn, query[:, :, start:stop], *parts, use_reentrant=False)
        found.append(turn)
    return torch.cat(found, 2)


def _turn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    last = query.shape[2]
    mask = query.new_zeros(last, key.shape[2])
    mask[:, -last:] = query.new_full((last, last), -torch.inf).triu(1)
    return attend(query, key, value, mask)


def band(window: int | None, queries: int, before: int, like: Tensor, present: Tensor | None) -> Tensor:
    """0 where a query sees a key, -inf elsewhere, in the dtype of `like`: ``[queries, before + queries]``, of
    the last `queries` tokens; with `present`, bool ``[rows, before + queries]``, for each row
    ``[rows, 1, …]``.

    A query without any key would be NaN, and NaN reaches other rows' sums: so padding sees itself.
    """
    at = torch.arange(before + queries, device=like.device)
    distance = at[before:, None] - at
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    if present is not None:
        seen = ((seen & present[:, None, :]) | (distance == 0))[:, None]
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


class FusedAttention(torch.nn.Module):
    """softmax(q kᵀ / sqrt(d)) v with rotary positions and grouped queries, causal in every row, within the
    layer's window if there is one."""

    def __init__(self, config: ShapedConfig, layer_number: int, **_: Any):
        super().__init__()
        self.layer_number, self.shape = layer_number, config.shape
        self.window = config.shape.window_of(layer_number - 1)  # Megatron counts from 1, over all stages

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: TokenPlaces, **_: Any
    ) -> Tensor:
        """Attention of every token to those of its row up to it.

        Args:
            query: ``[places, 1, heads, d]``; key, value: ``[places, 1, kv_heads, d]``.
            attention_mask: what Megatron hands on as one.

        Returns:
            ``[places, 1, heads * d]``.
        """
        turned, pack = attention_mask.rotation, attention_mask.pack
        if self.window is not None and attention_mask.windowed is not None:
            turned = attention_mask.windowed
        tensors = turned(query.squeeze(1)), turned(key.squeeze(1)), value.squeeze(1)
        if self.shape.query_factor != 1:
            tensors = tensors[0] * self.shape.query_factor, *tensors[1:]
        if isinstance(pack, ContextShard):
            return self._over_ranks(pack, *tensors).unsqueeze(1)
        if runs_on(tensors[0]) and is_parallel(pack.groups, tensors[1]) and not self.shape.explicit_scores:
            return attend_causally(*tensors, pack.groups, self.window).flatten(1).unsqueeze(1)
        sizes = [rows * longest for rows, longest in pack.blocks]
        parts = (pack.gather.rows(x).split(sizes) for x in tensors)
        found: list[Tensor] = []
        for shape, *block in zip(pack.blocks, *parts, strict=True):
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in block)
            out = self._attend(q, k, v)
            found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        whole = torch.cat(found) if len(found) > 1 else found[0]
        return pack.gather.back(whole).unsqueeze(1)

    def _over_ranks(self, shard: ContextShard, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[places, heads * d]`` of ``[places, heads or fewer, d]``. Collective over the shard's ranks."""
        everywhere = gather_from_sequence_parallel_region(torch.cat([key, value], 1), group=shard.group)
        keys, values = everywhere.chunk(2, 1)
        found: list[Tensor] = []
        for row in shard.rows:
            k, v = (x.index_select(0, row.keys).transpose(0, 1)[None] for x in (keys, values))
            for at in row.queries:
                q = query[at.start : at.stop].transpose(0, 1)[None]
                out = self._attend(q, k[:, :, : at.end], v[:, :, : at.end])
                found.append(out[0].transpose(0, 1).flatten(1))
        padding = query.new_zeros(len(query) - sum(map(len, found)), query[0].numel())
        # A rank without queries takes part in the backward pass of what was gathered, too.
        return torch.cat([*found, padding + everywhere[:0].sum()])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.window is None or self.window >= key.shape[2]:
            return attend_last(query, key, value)
        return attend_within(self.window, query, key, value)
