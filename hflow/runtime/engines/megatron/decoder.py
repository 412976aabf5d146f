"""The forward pass that sampling needs, on the weights of a built model.

Megatron's modules are made for training. With one token per row, more than half of their time went into what
lies around the matrix products; here that is a handful of operations per layer, without a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.megatron.attention import attend, attend_within, band
from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.shaped_config import shape_of_model


@dataclass(frozen=True)
class Sight:
    """What tokens see. `present`: bool ``[rows, tokens so far]``, False where there is padding; None: no
    padding. `mask`: of several tokens in layers without a window, for `attend`; None: causal."""

    present: Tensor | None
    mask: Tensor | None


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
        self.shape = shape_of_model(model)
        self.windows = [self.shape.window_of(number) for number in range(self.shape.num_layers)]
        self.cos, self.sin = _rotations(positions, self.shape, config.params_dtype)

    def cache(self, rows: int) -> KeyValueCache:
        """An empty one."""
        weight = self.layers[0].mlp.linear_fc1.weight
        shape = rows, self.groups, self.length, self.head_dim
        return KeyValueCache([(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.layers])

    def __call__(self, tokens: Tensor, present: Tensor | None, cache: KeyValueCache) -> Tensor:
        """Logits after the last of `tokens`, ``[rows, vocab]`` on every tensor-parallel rank.

        Rotary embeddings count positions from the left edge of the padding. Attention depends only on
        differences of positions, so a row's padding does not change it.

        Args:
            tokens: int64 ``[rows, new]``.
            present: bool ``[rows, used + new]``, False where there is padding; None: nowhere. Several new
                tokens are the first ones.
        """
        new = tokens.shape[1]
        assert new == 1 or not cache.used, "of several tokens all others would have to be seen, too"
        sight = Sight(present, _causal(present, new, self.windows, self.cos))
        x = self.model.embedding.word_embeddings(tokens)  # [rows, new, hidden]
        for number, layer in enumerate(self.layers):
            x = x + self._attention(number, layer, self._norm(x, layer.input_layernorm), sight, cache)
            x = x + self._mlp(layer.mlp, self._norm(x, layer.pre_mlp_layernorm))
        cache.advance(tokens.shape[1])
        return self._logits(self._norm(x[:, -1], self.model.decoder.final_layernorm))

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, (self.hidden,), norm.weight, self.eps)

    def _attention(self, number: int, layer: Any, x: Tensor, sight: Sight, cache: KeyValueCache) -> Tensor:
        rows, new, _ = x.shape
        fused = layer.self_attention.linear_qkv
        # Of every group its queries, which share a key and a value; then these.
        qkv = linear(x, fused.weight, fused.bias).view(rows, new, self.groups, -1, self.head_dim)
        turned = self._turned(self._each_normed(layer.self_attention, qkv[:, :, :, :-1]), cache.used)
        queries = turned[:, :, :, :-1]
        keys, values = cache.add(number, turned[:, :, :, -1], qkv[:, :, :, -1])
        window = self.windows[number]
        if new == 1:  # queries that share a key are queries of one head: it is read once
            found = _newest(queries[:, 0], keys, values, window, sight.present)
        elif window is not None and window < new:
            found = attend_within(window, _heads(queries), keys, values, sight.present).transpose(1, 2)
        else:
            found = attend(_heads(queries), keys, values, sight.mask).transpose(1, 2)
        return self._summed(linear(found.reshape(rows, new, -1), layer.self_attention.linear_proj.weight))

    def _each_normed(self, attention: Any, x: Tensor) -> Tensor:
        """Each head of ``[rows, new, groups, heads, d]`` by itself; a group's last is that of its key."""
        if not self.shape.qk_norm:
            return x
        parts = (x[:, :, :, :-1], attention.q_layernorm), (x[:, :, :, -1:], attention.k_layernorm)
        return torch.cat([rms_norm(part, (self.head_dim,), norm.weight, self.eps) for part, norm in parts], 3)

    def _turned(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding (arXiv:2104.09864) of ``[rows, new, groups, heads, d]`` from place `start` on."""
        cos, sin = (table[start : start + x.shape[1], None, None] for table in (self.cos, self.sin))
        turning, still = x.tensor_split([cos.shape[-1]], -1)
        swapped = turning.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        turned = torch.addcmul(turning * cos, swapped, sin)
        return torch.cat([turned, still], -1) if still.shape[-1] else turned

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


def _causal(present: Tensor | None, new: int, windows: Sequence[int | None], like: Tensor) -> Tensor | None:
    """The mask of `Sight`, where there is padding and a layer that sees all of it."""
    if present is None or new == 1 or all(window is not None and window < new for window in windows):
        return None
    return band(None, new, 0, like, present)


def _newest(query: Tensor, key: Tensor, value: Tensor, window: int | None, present: Tensor | None) -> Tensor:
    """Attention of one token, ``[rows, groups, heads, d]``, to all so far or the last `window` of them."""
    first = max(0, key.shape[2] - window) if window is not None else 0
    mask = None if present is None else present[:, None, None, first:]
    return scaled_dot_product_attention(query, key[:, :, first:], value[:, :, first:], attn_mask=mask)


def _heads(queries: Tensor) -> Tensor:
    """``[rows, new, groups, heads, d]`` as ``[rows, groups * heads, new, d]``."""
    return queries.permute(0, 2, 3, 1, 4).flatten(1, 2)


def _rotations(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign of the other half of a head that they go with, ``[length, d]``."""
    turn = Rotation.of(positions, shape, dtype)
    return torch.cat([turn.cos, turn.cos], -1), torch.cat([-turn.sin, turn.sin], -1)
