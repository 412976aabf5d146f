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
from torch.nn.functional import embedding, scaled_dot_product_attention

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.megatron.adapter import adapted
from hflow.runtime.engines.megatron.attention import attend, attend_within
from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.cpu_kernels.layer_stack import LayerStack
from hflow.runtime.engines.megatron.cpu_kernels.library import runs_on
from hflow.runtime.engines.megatron.cpu_kernels.linear import linear
from hflow.runtime.engines.megatron.cpu_kernels.newest import attend_newest as attend_newest_on_cpu
from hflow.runtime.engines.megatron.cpu_kernels.place import place as place_on_cpu
from hflow.runtime.engines.megatron.decoder_blocks import attention_block, mlp_block
from hflow.runtime.engines.megatron.embedding import embedding_factor
from hflow.runtime.engines.megatron.explicit_attention import attend_explicitly, attend_explicitly_newest
from hflow.runtime.engines.megatron.prefix import Prefix
from hflow.runtime.engines.megatron.rotary import Rotation
from hflow.runtime.engines.megatron.shaped_config import shape_of_model
from hflow.runtime.engines.megatron.sight import GrowingSight, Sight, StaticSight
from hflow.runtime.engines.megatron.soft_cap import cap_


class Decoder:
    """Next-token logits of a model without pipeline stages, for a batch of up to `length` tokens per row."""

    def __init__(self, model: GPTModel, length: int):
        config: Any = model.config
        self.model, self.length = model, length
        self.tp: dist.ProcessGroup = model.pg_collection.tp
        self.groups = config.num_query_groups // self.tp.size()
        self.head_dim: int = config.kv_channels
        self.layers: Any = model.decoder.layers
        positions = torch.arange(length, device=self.layers[0].self_attention.linear_qkv.weight.device)
        self.shape = shape_of_model(model)
        self.windows = [self.shape.window_of(number) for number in range(self.shape.num_layers)]
        self.attention_blocks = [
            attention_block(layer, number, self.shape, self.groups)
            for number, layer in enumerate(self.layers)
        ]
        self.mlp_blocks = [mlp_block(layer, self.shape) for layer in self.layers]
        self.turns = _turns(positions, self.shape, config.params_dtype)
        self.stack = self._stack()
        self.embedding_factor = embedding_factor(self.shape, config.params_dtype)

    def _stack(self) -> LayerStack | None:
        """None without kernels, and where something happens between the blocks of layers: sums over ranks,
        norms, biases."""
        is_biased = any(layer.self_attention.linear_proj.bias is not None for layer in self.layers)
        if not self.can_share or self.tp.size() > 1 or self.shape.post_norms or is_biased:
            return None
        half = self.turns[0][0].shape[1] // 2
        turns = [(cos[:, half:], sin[:, half:]) for cos, sin in self.turns]
        return LayerStack.of(self.attention_blocks, self.mlp_blocks, turns)

    @property
    def can_share(self) -> bool:
        """Whether rows may have a prefix in common: what attends to it is for CPUs."""
        return runs_on(self.layers[0].self_attention.linear_qkv.weight, self.turns[0][0])

    def cache(self, rows: int, length: int) -> KeyValueCache:
        """An empty one for so many tokens of each row."""
        weight = self.layers[0].self_attention.linear_qkv.weight
        shape = rows, self.groups, length, self.head_dim
        return KeyValueCache([(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.layers])

    def __call__(self, tokens: Tensor, present: Tensor | None, cache: KeyValueCache) -> Tensor:
        """Logits after the last of `tokens`, ``[rows, vocab]`` on every tensor-parallel rank.

        Rotary embeddings count positions from the left edge of the padding. Attention depends only on
        differences of positions, so a row's padding does not change it.

        Args:
            tokens: int64 ``[rows, new]``.
            present: bool ``[rows, used + new]``, False where there is padding; None: nowhere but in the
                cache's prefix. Several new tokens are the first ones.
        """
        new = tokens.shape[1]
        assert new == 1 or not cache.tokens, "of several tokens all others would have to be seen, too"
        sight = GrowingSight.of(cache.tokens, new, present, self.windows, self.turns[0][0])
        found = self._logits(self._through(tokens, sight, cache)[:, -1])
        cache.advance(new)
        return found

    def newest(self, tokens: Tensor, sight: StaticSight, cache: KeyValueCache) -> Tensor:
        """Logits after one more token of each row, int64 ``[rows]``, at the place that `sight` has on the
        device: nothing is asked of it, and no shape depends on what it is. The cache does not advance."""
        return self._logits(self._through(tokens[:, None], sight, cache)[:, 0])

    def _through(self, tokens: Tensor, sight: Sight, cache: KeyValueCache) -> Tensor:
        """The last hidden states, normed, ``[rows, new, hidden]``."""
        x = self._embedded(tokens)
        if self.embedding_factor != 1:
            x = x * self.embedding_factor
        final: Any = self.model.decoder.final_layernorm
        if cache.prefix is not None and self.stack is not None and self.stack.has(x):
            return final(self.stack(x, cache))
        for number, layer in enumerate(self.layers):
            x = self._added(x, self._attention(number, layer, x, sight, cache), layer.self_attn_bda)
            if layer is self.layers[-1] and not self.shape.moe:  # whose routes may be asked for
                x = x[:, -1:]
            x = self._added(x, self._mlp(number, layer, x), layer.mlp_bda)
        return final(x[:, -1:])

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``[rows, new, hidden]``."""
        embeddings: Any = self.model.embedding.word_embeddings
        if self.tp.size() > 1:
            return embeddings(tokens)
        return embedding(tokens, embeddings.weight)  # without what Megatron asks first

    def _added(self, x: Tensor, branch: Tensor, added: Any) -> Tensor:
        """`added`: the layer's `NormedResidual`, if it has norms there."""
        return x + (added.norm(branch) if self.shape.post_norms else branch)

    def _attention(self, number: int, layer: Any, x: Tensor, sight: Sight, cache: KeyValueCache) -> Tensor:
        out, block = layer.self_attention.linear_proj, self.attention_blocks[number]
        if cache.prefix is not None and block is not None and block.has(x):
            own = cache.first(number, cache.used + 1)
            found = self._summed(block(x, self._angles(number, cache.tokens), number, cache.prefix, own))
            return found if out.bias is None else found + out.bias
        x, fused = layer.input_layernorm(x), layer.self_attention.linear_qkv
        rows, new, _ = x.shape
        # Of every group its queries, which share a key and a value; then these.
        qkv = adapted(fused, x, linear(x, fused.weight, fused.bias))
        qkv = qkv.view(rows, new, self.groups, -1, self.head_dim)
        normed, values = self._each_normed(layer.self_attention, qkv[:, :, :, :-1]), qkv[:, :, :, -1]
        if isinstance(sight, StaticSight) and x.is_cuda:
            found = self._attended_by_kernels(number, normed[:, 0], values[:, 0], sight, cache)
        else:
            found = self._attended(number, normed, values, sight, cache)
        found = found.reshape(rows, new, -1)
        projected = adapted(out, found, self._summed(linear(found, out.weight)))
        return projected if out.bias is None else projected + out.bias

    def _attended(self, number: int, x: Tensor, values: Tensor, sight: Sight, cache: KeyValueCache) -> Tensor:
        """``[rows, new, …]`` of queries and keys that are yet to turn, ``[rows, new, groups, heads + 1, d]``,
        of each group the key last. Keys and `values`, ``[rows, new, groups, d]``, go to the cache."""
        if cache.prefix is not None:
            return self._attended_after(cache.prefix, number, x[:, 0], values[:, 0], cache)
        turned = _turned(x, *(sight.turns(table)[:, None, None] for table in self.turns[number]))
        queries = turned[:, :, :, :-1]
        if self.shape.query_factor != 1:
            queries = queries * self.shape.query_factor
        keys, values = sight.add(cache, number, turned[:, :, :, -1], values)
        if isinstance(sight, GrowingSight) and x.shape[1] > 1:
            return self._first(number, _heads(queries), keys, values, sight).transpose(1, 2)
        # queries that share a key are queries of one head: it is read once
        return self._newest(number, queries[:, 0], keys, values, sight)

    def _attended_after(
        self, prefix: Prefix, number: int, x: Tensor, values: Tensor, cache: KeyValueCache
    ) -> Tensor:
        """As `_attended`, by kernels for CPUs, of one token a row."""
        angles, newest = self._angles(number, cache.tokens), cache.newest(number)
        query = place_on_cpu(x, values, angles, newest, self.shape.query_factor)
        own = cache.first(number, cache.used + 1)
        terms = self.shape.attention_cap, self._sinks(number), self.windows[number]
        return attend_newest_on_cpu(query, number, prefix, own, *terms)

    def _angles(self, number: int, place: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a place, ``[turning / 2]``."""
        cos, sin = self.turns[number]
        half = cos.shape[1] // 2
        return cos[place, half:], sin[place, half:]

    def _attended_by_kernels(
        self, number: int, x: Tensor, values: Tensor, sight: StaticSight, cache: KeyValueCache
    ) -> Tensor:
        """As `_attended`, on CUDA, of one token a row."""
        # where there is CUDA there is Triton
        from hflow.runtime.engines.megatron.kernels.newest import attend_newest
        from hflow.runtime.engines.megatron.kernels.place import place

        memory, present = cache.layers[number], sight.present[self.windows[number]]
        query = place(x, values, self.turns[number], sight.at, memory, self.shape.query_factor)
        if self.shape.explicit_scores:
            return self._newest(number, query, *cache.first(number, sight.places), sight)
        return attend_newest(query, *cache.first(number, sight.places), present)

    def _first(self, number: int, query: Tensor, key: Tensor, value: Tensor, sight: GrowingSight) -> Tensor:
        """Attention of the first tokens, ``[rows, heads, new, d]``."""
        window, new = self.windows[number], query.shape[2]
        if self.shape.explicit_scores:
            terms = self.shape.attention_cap, self._sinks(number)
            return attend_explicitly(query, key, value, *terms, window, sight.present)
        if sight.takes_turns or (window is not None and window < new):
            return attend_within(min(window or new, new), query, key, value, sight.present)
        return attend(query, key, value, sight.mask)

    def _newest(self, number: int, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        """Attention of one token, ``[rows, groups, heads, d]``, to all so far or the last of a window."""
        key, value, present = sight.seen(key, value, self.windows[number])
        if self.shape.explicit_scores:
            terms = self.shape.attention_cap, self._sinks(number)
            return attend_explicitly_newest(query, key, value, *terms, present)
        mask = None if present is None else present[:, None, None]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def _sinks(self, number: int) -> Tensor | None:
        if not self.shape.sinks:
            return None
        return self.layers[number].self_attention.core_attention.sinks

    def _each_normed(self, attention: Any, x: Tensor) -> Tensor:
        """Each head of ``[rows, new, groups, heads, d]`` by itself; a group's last is that of its key."""
        if not self.shape.qk_norm:
            return x
        parts = (x[:, :, :, :-1], attention.q_layernorm), (x[:, :, :, -1:], attention.k_layernorm)
        return torch.cat([norm(part) for part, norm in parts], 3)

    def _mlp(self, number: int, layer: Any, x: Tensor) -> Tensor:
        block, mlp = self.mlp_blocks[number], layer.mlp
        if block is not None and block.has(x):
            return self._summed(block(x))
        x = layer.pre_mlp_layernorm(x)
        if self.shape.moe:
            return mlp(x)[0]
        inside = mlp.activation_func(adapted(mlp.linear_fc1, x, linear(x, mlp.linear_fc1.weight)))
        return adapted(mlp.linear_fc2, inside, self._summed(linear(inside, mlp.linear_fc2.weight)))

    def _summed(self, part: Tensor) -> Tensor:
        if self.tp.size() > 1:
            dist.all_reduce(part, group=self.tp)
        return part

    def _logits(self, x: Tensor) -> Tensor:
        tied = self.model.share_embeddings_and_output_weights
        ends: Any = self.model
        weight = ends.shared_embedding_or_output_weight() if tied else ends.output_layer.weight
        part = linear(x, weight)
        if self.shape.logit_cap is not None:
            part = cap_(part, self.shape.logit_cap)
        if self.tp.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp.size())]
        dist.all_gather(parts, part, group=self.tp)
        return torch.cat(parts, -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of ``[rows, new, groups, heads, d]``."""
    turning, still = x.tensor_split([cos.shape[-1]], -1)
    swapped = turning.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned = torch.addcmul(turning * cos, swapped, sin)
    return torch.cat([turned, still], -1) if still.shape[-1] else turned


def _heads(queries: Tensor) -> Tensor:
    """``[rows, new, groups, heads, d]`` as ``[rows, groups * heads, new, d]``."""
    return queries.permute(0, 2, 3, 1, 4).flatten(1, 2)


def _turns(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Of each layer the cosines, and sines with the sign of the other half of a head that they go with,
    ``[length, d]``; layers that turn alike share them."""
    everywhere, windowed = _tables(Rotation.of(positions, shape, dtype)), None
    if (turn := Rotation.windowed(positions, shape, dtype)) is not None:
        windowed = _tables(turn)
    return [
        everywhere if windowed is None or shape.window_of(layer) is None else windowed
        for layer in range(shape.num_layers)
    ]


def _tables(turn: Rotation) -> tuple[Tensor, Tensor]:
    return torch.cat([turn.cos, turn.cos], -1), torch.cat([-turn.sin, turn.sin], -1)
