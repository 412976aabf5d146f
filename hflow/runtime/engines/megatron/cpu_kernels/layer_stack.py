"""All layers for one token of each row, by one call, where nothing else happens between them.

With few rows, what Python does between the calls of single blocks is a fifth of a small model's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.cpu_kernels.layer import AttentionBlock, MlpBlock
from hflow.runtime.engines.megatron.cpu_kernels.library import call
from hflow.runtime.engines.megatron.cpu_kernels.linear import room
from hflow.runtime.engines.megatron.cpu_kernels.newest import KeysAndValues
from hflow.runtime.engines.megatron.prefix import Prefix

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines of all places, ``[places, turning / 2]``


class LayerStack:
    """Layers of equal sizes, of which each adds what its two blocks give.

    `table`, int64: of each layer the addresses of what `Layer` in `layer_stack.h` has, and its window.
    """

    def __init__(
        self, attention: Sequence[AttentionBlock], mlps: Sequence[MlpBlock], turns: Sequence[RotaryTables]
    ) -> None:
        self.attention, self.mlps, self.turns = attention, mlps, turns
        rows = [
            [*_weights(*blocks), *_addresses(*of_layer), 0, 0, 0, 0, blocks[0].window or 0]
            for blocks, of_layer in zip(zip(attention, mlps), turns, strict=True)
        ]
        self.table = torch.tensor(rows, dtype=torch.int64)
        self._seen: Prefix | None = None  # whose addresses the table has

    @staticmethod
    def of(
        attention: Sequence[AttentionBlock | None],
        mlps: Sequence[MlpBlock | None],
        turns: Sequence[RotaryTables],
    ) -> LayerStack | None:
        """None: some layer has no such block, or one that differs in more than its weights and its window."""
        firsts, seconds = [x for x in attention if x], [x for x in mlps if x]
        if not len(firsts) == len(attention) == len(seconds):
            return None
        forms = {_form(*layer) for layer in zip(firsts, seconds, turns, strict=True)}
        norms = {(block.norm.eps, block.norm.offset) for block in (*firsts, *seconds)}
        return LayerStack(firsts, seconds, turns) if len(forms) == len(norms) == 1 else None

    def has(self, x: Tensor) -> bool:
        """Whether there are kernels for ``[rows, 1, hidden]``."""
        return self.attention[0].has(x) and self.mlps[0].has(x)

    def __call__(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        """Hidden states after the last layer, of those before the first, ``[rows, 1, hidden]``.

        Keys and values go to the next place of the cache, which has a prefix and does not advance.
        """
        first, mlp, prefix = self.attention[0], self.mlps[0], cache.prefix
        assert prefix is not None
        if prefix is not self._seen:
            self._see(prefix, cache.layers)
        rows, hidden, cos, (own, _) = len(x), x.shape[-1], self.turns[0][0], cache.layers[0]
        groups, width, ffn, queries = own.shape[1], own.shape[3], mlp.down.shape[1], first.out.shape[1]
        x, is_gelu = x.clone(memory_format=torch.contiguous_format), mlp.activation == "gelu_tanh"
        between = max(hidden + len(first.qkv) + 2 * queries, hidden + 3 * ffn)
        space = x.new_empty(rows * (hidden + between) + room(rows, first.qkv, first.out, mlp.up, mlp.down))
        call(
            "layers", x, is_gelu, x, self.table, prefix.present, prefix.of, prefix.order, space,
            len(self.attention), rows, hidden, groups, first.heads, width, cos.shape[1], ffn, prefix.places,
            *prefix.layers[0][0].stride()[:2], cache.used + 1, *own.stride()[:2],
            cache.tokens * cos.stride(0), first.norm.eps, first.norm.offset, first.factor, first.cap or 0.0,
        )  # fmt: skip
        return x

    def _see(self, prefix: Prefix, layers: list[KeysAndValues]) -> None:
        """Have the addresses of a cache's keys and values. They stay where they are when rows leave."""
        for number, memories in enumerate(zip(prefix.layers, layers, strict=True)):
            given = [memory for pair in memories for memory in pair]
            assert all(x.stride(2) == x.shape[3] and x.stride(3) == 1 for x in given)
            self.table[number, -5:-1] = torch.tensor(_addresses(*given))
        assert prefix.present is None or (
            prefix.present.dtype == torch.bool and prefix.present.is_contiguous()
        )
        for part in (prefix.layers, layers):
            assert len({(x.shape, x.stride()) for pair in part for x in pair}) == 1
        self._seen = prefix


def _weights(attention: AttentionBlock, mlp: MlpBlock) -> list[int]:
    norms = attention.head_norms or (None, None)
    before, after = (attention.norm.weight, attention.qkv, attention.bias), (attention.out, attention.sinks)
    return _addresses(*before, *norms, *after, mlp.norm.weight, mlp.up, mlp.down)


def _addresses(*given: Tensor | None) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in given]


def _form(attention: AttentionBlock, mlp: MlpBlock, turns: RotaryTables) -> tuple[object, ...]:
    """What one call takes as equal in all layers, beside norms."""
    given = attention.qkv, attention.out, mlp.up, mlp.down, *turns
    of_attention = attention.groups, attention.heads, attention.factor, attention.cap
    return *((x.shape, x.stride()) for x in given), *of_attention, mlp.activation
