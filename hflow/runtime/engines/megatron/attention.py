"""Attention by torch's fused kernel, behind Megatron's core-attention interface.

Megatron's local attention makes every score matrix in memory and takes its work buffer from a global;
the fused kernel does neither, and needs no mask tensor for causal attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hflow.runtime.engines.megatron.pack import Pack


class FusedAttention(torch.nn.Module):
    """softmax(q kᵀ / sqrt(d)) v, with grouped queries."""

    def __init__(self, config: Any, layer_number: int, **_: Any):
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Pack | None, **_: Any
    ) -> Tensor:
        """Attention of every query to the keys it may see.

        Args:
            query: ``[queries, batch, heads, d]``.
            key, value: ``[keys, batch, kv_heads, d]``.
            attention_mask: bool ``[batch, 1, queries, keys]``, True where a query sees a key; None
                means causal, or, for a single query, all keys; a pack says which of the queries and keys
                ``[places, 1, …]`` make up its rows, in which attention is causal.

        Returns:
            ``[queries, batch, heads * d]``.
        """
        if isinstance(attention_mask, Pack):
            return _packed(query.squeeze(1), key.squeeze(1), value.squeeze(1), attention_mask)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        causal = attention_mask is None and q.shape[2] > 1
        return _attention(q, k, v, attention_mask, causal).permute(2, 0, 1, 3).flatten(2)


def _packed(query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> Tensor:
    """``[places, 1, heads * d]`` of ``[places, heads or kv_heads, d]``."""
    found: list[Tensor] = []
    for block in pack.blocks:
        at = block.flatten()
        q, k, v = (
            x.index_select(0, at).unflatten(0, block.shape).transpose(1, 2) for x in (query, key, value)
        )
        found.append(_attention(q, k, v, None, True).transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(found).index_select(0, pack.found_at).unsqueeze(1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """``[batch, heads, queries, d]``."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
