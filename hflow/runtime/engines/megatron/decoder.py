"""The forward pass that sampling needs, on the weights of a built model.

Megatron's modules are made for training. With one token per row, more than half of their time went into what
lies around the matrix products; here that is a handful of operations per layer, without a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from hflow.runtime.engines.megatron.attention import attend
from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.rotary import Rotation


class Decoder:
    """Next-token logits of a model without pipeline stages, for a batch of up to `length` tokens per row."""

    def __init__(self, model: GPTModel, length: int):
        config: Any = model.config
        self.model, self.length = model, length
        self.tp: dist.ProcessGroup = model.pg_collection.tp
        self.groups = config.num_query_groups // self.tp.size()
        self.head_dim: int = config.kv_channels
        self.eps: float = config.layernorm_epsilon
        self.hidden: int = config.hidden_size
        self.layers: Any = model.decoder.layers
        positions = torch.arange(length, device=self.layers[0].mlp.linear_fc1.weight.device)
        angles = self.head_dim, model.rotary_base, config.params_dtype
        self.cos, self.sin = _rotations(positions, *angles)

    def cache(self, rows: int) -> KeyValueCache:
        """An empty one."""
        weight = self.layers[0].mlp.linear_fc1.weight
        shape = rows, self.groups, self.length, self.head_dim
        return KeyValueCache([(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.layers])

    def __call__(self, tokens: Tensor, mask: Tensor | None, cache: KeyValueCache) -> Tensor:
        """Logits after the last of `tokens`, ``[rows, vocab]`` on every tensor-parallel rank.

        Rotary embeddings count positions from the left edge of the padding. Attention depends only on
        differences of positions, so a row's padding does not change it.

        Args:
            tokens: int64 ``[rows, new]``.
            mask: bool ``[rows, 1, new, used + new]``, True where a token sees another; None: causal.
        """
        x = self.model.embedding.word_embeddings(tokens)  # [rows, new, hidden]
        for number, layer in enumerate(self.layers):
            x = x + self._attention(number, layer, self._norm(x, layer.input_layernorm), mask, cache)
            x = x + self._mlp(layer.mlp, self._norm(x, layer.pre_mlp_layernorm))
        cache.advance(tokens.shape[1])
        return self._logits(self._norm(x[:, -1], self.model.decoder.final_layernorm))

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, (self.hidden,), norm.weight, self.eps)

    def _attention(
        self, number: int, layer: Any, x: Tensor, mask: Tensor | None, cache: KeyValueCache
    ) -> Tensor:
        rows, new, _ = x.shape
        fused = layer.self_attention.linear_qkv
        # Of every group its queries, which share a key and a value; then these.
        qkv = linear(x, fused.weight, fused.bias).view(rows, new, self.groups, -1, self.head_dim)
        turned = self._turned(qkv[:, :, :, :-1], cache.used)
        queries = turned[:, :, :, :-1]
        keys, values = cache.add(number, turned[:, :, :, -1], qkv[:, :, :, -1])
        if new == 1:  # queries that share a key are queries of one head: it is read once
            found = scaled_dot_product_attention(queries[:, 0], keys, values, attn_mask=mask)
        else:
            heads = queries.permute(0, 2, 3, 1, 4).flatten(1, 2)
            found = attend(heads, keys, values, mask).transpose(1, 2)
        return self._summed(linear(found.reshape(rows, new, -1), layer.self_attention.linear_proj.weight))

    def _turned(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding (arXiv:2104.09864) of ``[rows, new, groups, heads, d]`` from place `start` on."""
        cos, sin = (table[start : start + x.shape[1], None, None] for table in (self.cos, self.sin))
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.addcmul(x * cos, swapped, sin)

    def _mlp(self, mlp: Any, x: Tensor) -> Tensor:
        gate, up = linear(x, mlp.linear_fc1.weight).chunk(2, -1)
        return self._summed(linear(silu(gate).mul_(up), mlp.linear_fc2.weight))

    def _summed(self, part: Tensor) -> Tensor:
        if self.tp.size() > 1:
            dist.all_reduce(part, group=self.tp)
        return part

    def _logits(self, x: Tensor) -> Tensor:
        tied = self.model.share_embeddings_and_output_weights
        ends: Any = self.model
        weight = ends.shared_embedding_or_output_weight() if tied else ends.output_layer.weight
        part = linear(x, weight)
        if self.tp.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp.size())]
        dist.all_gather(parts, part, group=self.tp)
        return torch.cat(parts, -1)


def _rotations(positions: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign of the other half of a head that they go with, ``[length, d]``."""
    turn = Rotation.of(positions, *of)
    return torch.cat([turn.cos, turn.cos], -1), torch.cat([-turn.sin, turn.sin], -1)
