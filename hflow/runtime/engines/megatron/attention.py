"""Attention by torch's fused kernel, behind Megatron's core-attention interface.

Megatron's local attention makes every score matrix in memory and takes its work buffer from a global;
the fused kernel does neither, and needs no mask tensor for causal attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class FusedAttention(torch.nn.Module):
    """softmax(q kᵀ / sqrt(d)) v, with grouped queries."""

    def __init__(self, config: Any, layer_number: int, **_: Any):
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Attention of every query to the keys it may see.

        Args:
            query: ``[queries, batch, heads, d]``.
            key, value: ``[keys, batch, kv_heads, d]``.
            attention_mask: bool ``[batch, 1, queries, keys]``, True where a query sees a key; None
                means causal, or, for a single query, all keys.

        Returns:
            ``[queries, batch, heads * d]``.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        causal = attention_mask is None and q.shape[2] > 1
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=causal, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)
