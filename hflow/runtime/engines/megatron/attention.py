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
class TokenPlaces:
    """What attention knows of the tokens: the rows that they make up, and how each turns by its position."""

    pack: Pack
    rotation: Rotation


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


class FusedAttention(torch.nn.Module):
    """softmax(q kᵀ / sqrt(d)) v with rotary positions and grouped queries, causal in every row."""

    def __init__(self, config: Any, layer_number: int, **_: Any):
        super().__init__()
        self.layer_number = layer_number

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
        tensors = turned(query.squeeze(1)), turned(key.squeeze(1)), value.squeeze(1)
        found: list[Tensor] = []
        for block in pack.blocks:
            at = block.flatten()
            q, k, v = (x.index_select(0, at).unflatten(0, block.shape).transpose(1, 2) for x in tensors)
            out = attend(q, k, v)
            found.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(found).index_select(0, pack.found_at).unsqueeze(1)
