"""All layers by one call, against their blocks, one after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hflow.plan.model_shape import Activation
from hflow.runtime.engines.megatron.cache import KeyValueCache
from hflow.runtime.engines.megatron.cpu_kernels import library
from hflow.runtime.engines.megatron.cpu_kernels.layer import AttentionBlock, MlpBlock, NormWeight
from hflow.runtime.engines.megatron.cpu_kernels.layer_stack import LayerStack, RotaryTables

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
GROUPS, HEADS, WIDTH, HIDDEN, FFN, TURNING = 2, 3, 16, 96, 64, 6
LAYERS, PROMPT, ROOM, EPS = 3, 33, 9, 1e-5


def attention(dtype: torch.dtype, changes: dict[str, float], window: int | None) -> AttentionBlock:
    outputs, offset = GROUPS * (HEADS + 2) * WIDTH, int(changes.get("offset", 0))
    return AttentionBlock(
        NormWeight(torch.randn(HIDDEN).to(dtype), EPS, offset),
        (torch.randn(outputs, HIDDEN) / 10).to(dtype),
        torch.randn(outputs).to(dtype) if "bias" in changes else None,
        (torch.randn(WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)) if "head_norms" in changes else None,
        (torch.randn(HIDDEN, GROUPS * HEADS * WIDTH) / 10).to(dtype),
        GROUPS,
        HEADS,
        changes.get("factor", 1.0),
        changes.get("cap"),
        torch.randn(GROUPS * HEADS) if "sinks" in changes else None,
        window,
    )


def mlp(dtype: torch.dtype, changes: dict[str, float]) -> MlpBlock:
    norm = NormWeight(torch.randn(HIDDEN).to(dtype), EPS, int(changes.get("offset", 0)))
    activation: Activation = "gelu_tanh" if "gelu" in changes else "silu"
    up, down = torch.randn(2 * FFN, HIDDEN) / 10, torch.randn(HIDDEN, FFN) / 10
    return MlpBlock(norm, up.to(dtype), down.to(dtype), activation)


def turns(dtype: torch.dtype) -> RotaryTables:
    """Parts of tables that are twice as wide, as the decoder has them."""
    angles = torch.randn(PROMPT + ROOM, 2 * TURNING)
    return angles.cos().to(dtype)[:, TURNING:], angles.sin().to(dtype)[:, TURNING:]


def prompts_cache(dtype: torch.dtype, present: Tensor | None) -> KeyValueCache:
    """Of 4 prompts that 9 rows continue, in no order; their padding holds NaN."""
    memories = [torch.randn(4, GROUPS, PROMPT + 3, WIDTH).to(dtype) for _ in range(2 * LAYERS)]
    if present is not None:
        for memory in memories:
            memory[:, :, :PROMPT][~present[:, None].expand(-1, GROUPS, -1)] = math.nan
    cache = KeyValueCache(list(zip(memories[::2], memories[1::2], strict=True)), PROMPT)
    cache.share(torch.tensor([2, 0, 1, 2, 3, 0, 0, 2, 1]), present, ROOM)
    return cache


def by_blocks(stack: LayerStack, x: Tensor, cache: KeyValueCache) -> Tensor:
    assert cache.prefix is not None
    for number, (first, second, (cos, sin)) in enumerate(zip(stack.attention, stack.mlps, stack.turns)):
        angles, own = (cos[cache.tokens], sin[cache.tokens]), cache.first(number, cache.used + 1)
        x = x + first(x, angles, number, cache.prefix, own)
        x = x + second(x)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("changes", [
    {}, {"offset": 1, "factor": 0.5, "gelu": True}, {"bias": True}, {"head_norms": True, "offset": 1},
    {"window": 3}, {"window": 20}, {"cap": 2.0}, {"sinks": True}, {"unpadded": True, "window": 20},
], ids=lambda changes: "-".join(changes) or "plain")  # fmt: skip
def test_it_is_bitwise_what_the_blocks_make(changes: dict[str, float], dtype: torch.dtype) -> None:
    """Of two caches, token after token, also after rows have left. Only every other layer has the window."""
    present = torch.arange(PROMPT) >= torch.tensor([0, 2, PROMPT // 2, PROMPT - 1])[:, None]
    windows = [int(changes["window"]) if "window" in changes and n % 2 else None for n in range(LAYERS)]
    stack = LayerStack.of(
        [attention(dtype, changes, window) for window in windows],
        [mlp(dtype, changes) for _ in windows],
        [turns(dtype) for _ in windows],
    )
    assert stack is not None and stack.has(torch.randn(9, 1, HIDDEN).to(dtype))
    for _ in range(2):
        decode(stack, prompts_cache(dtype, None if "unpadded" in changes else present), dtype)


def decode(stack: LayerStack, cache: KeyValueCache, dtype: torch.dtype) -> None:
    x = torch.randn(9, 1, HIDDEN).to(dtype)
    for token in range(ROOM):
        if token == 4:
            x = x[cache.keep(torch.tensor([0, 2, 5, 8]))]
        given = x.clone()
        expected = by_blocks(stack, x, cache)
        newest = [[memory.clone() for memory in cache.newest(layer)] for layer in range(LAYERS)]
        for memory in (memory for layer in range(LAYERS) for memory in cache.newest(layer)):
            memory.fill_(math.nan)  # to be written
        found = stack(x, cache)
        assert torch.equal(found, expected) and torch.equal(x, given)
        for layer in range(LAYERS):
            assert all(map(torch.equal, cache.newest(layer), newest[layer]))
        cache.advance(1)
        x = found / found.norm(dim=-1, keepdim=True) * HIDDEN**0.5


def test_one_call_is_for_layers_that_are_alike() -> None:
    f32 = torch.float32
    firsts, seconds = [attention(f32, {}, None) for _ in range(2)], [mlp(f32, {}) for _ in range(2)]
    angles = [turns(f32)] * 2
    assert LayerStack.of(firsts, seconds, angles) is not None
    assert LayerStack.of(firsts, [seconds[0], None], angles) is None
    assert LayerStack.of([None, firsts[1]], seconds, angles) is None
    assert LayerStack.of([firsts[0], replace(firsts[1], cap=2.0)], seconds, angles) is None
    assert LayerStack.of(firsts, [seconds[0], replace(seconds[1], activation="gelu_tanh")], angles) is None
    other = replace(seconds[1].norm, eps=1e-6)
    assert LayerStack.of(firsts, [seconds[0], replace(seconds[1], norm=other)], angles) is None
    assert LayerStack.of([firsts[0], replace(firsts[1], window=4)], seconds, angles) is not None
