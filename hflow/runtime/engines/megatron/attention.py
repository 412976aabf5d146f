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


@dataclass(frozen=True)
class Places:
    """What attention knows of the tokens: the rows that they make up, and how each turns by its position."""

    pack: Pack
    rotation: Rotation


class FusedAttention(torch.nn.Module):
    """softmax(q kᵀ / sqrt(d)) v with rotary positions and grouped queries, causal in every row."""

    def __init__(self, config: Any, layer_number: int, **_: Any):
        super().__init__()
        self.layer_number = layer_number

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Places, **_: Any) -> Tensor:
        """Attention of every token to those of its row up to it.

        Args:
            query: ``[places, 1, heads, d]``; key, value: ``[places, 1, kv_heads, d]``.
            attention_mask: what Megatron hands on as one.

        Returns:
            ``[places, 1, heads * d]``.
        """
        turned, pack = attention_mask.rotation, attention_mask.pack
        tensors = turned(query.squeeze(1)), turned(key.squeeze(1)), value.squeeze(1)
        found: list[Tensor] = []
        for block in pack.blocks:
            at = block.flatten()
            q, k, v = (x.index_select(0, at).unflatten(0, block.shape).transpose(1, 2) for x in tensors)
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(found).index_select(0, pack.found_at).unsqueeze(1)
