"""Attention by torch's fused kernel, behind Megatron's core-attention interface.

Megatron's local attention makes every score matrix in memory and takes its work buffer from a global;
the fused kernel does neither. Queries and keys turn here by rotary angles that all layers share: Megatron
would find their sines and cosines anew in each, and copy queries and keys six times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig

CHUNK = 512  # queries that look through a window at once


@dataclass(frozen=True)
class TokenPlaces:
    """What attention knows of the tokens: the rows that they make up, and how each turns by its position.
    `windowed`: how it turns in layers with a window, where it does so by other angles there."""

    pack: Pack
    rotation: Rotation
    windowed: Rotation | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Fused attention of ``[rows, heads, tokens, d]`` to keys and values of as many heads or fewer; causal
    without a mask.

    On CUDA torch's fused kernels take fewer heads in half precision and without a mask only; else it would
    make all scores in memory, so that keys and values are repeated first.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda and (mask is not None or query.dtype == torch.float32):
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
        present: bool ``[rows, tokens]``, False where there is padding, which only sees itself.
    """
    length = query.shape[2]
    found: list[Tensor] = []
    masks: dict[tuple[int, int], Tensor] = {}  # most chunks have the same one, and autograd keeps it
    for start in range(0, length, CHUNK):
        stop, first = min(start + CHUNK, length), max(0, start - window + 1)
        mask = masks.get((stop - start, start - first))
        if mask is None or present is not None:
            here = None if present is None else present[:, first:stop]
            mask = band(window, stop - start, start - first, query, here)
            masks[stop - start, start - first] = mask
        parts = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
        found.append(attend(*parts, mask))
    return torch.cat(found, 2)


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
        found: list[Tensor] = []
        for block in pack.blocks:
            at = block.flatten()
            q, k, v = (x.index_select(0, at).unflatten(0, block.shape).transpose(1, 2) for x in tensors)
            out = self._attend(q, k, v)
            found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(found).index_select(0, pack.found_at).unsqueeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.window is None or self.window >= query.shape[2]:
            return attend(query, key, value)
        return attend_within(self.window, query, key, value)
