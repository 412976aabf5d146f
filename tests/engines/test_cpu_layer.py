"""A layer's attention and MLP, made by one call each, against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from hflow.plan.model_shape import Activation
from hflow.runtime.engines.megatron.cpu_kernels import library, norm
from hflow.runtime.engines.megatron.cpu_kernels.layer import AttentionBlock, MlpBlock, NormWeight
from hflow.runtime.engines.megatron.cpu_kernels.linear import linear
from hflow.runtime.engines.megatron.cpu_kernels.newest import attend_newest
from hflow.runtime.engines.megatron.cpu_kernels.place import place
from hflow.runtime.engines.megatron.prefix import Prefix
from tests.engines.test_cpu_kernels import attended, prefix_case

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
GROUPS, HEADS, WIDTH, HIDDEN, TURNING = 2, 3, 16, 96, 6
EPS = 1e-5


def normed(x: Tensor, weight: Tensor, offset: int) -> Tensor:
    return rms_norm(x.double(), weight.shape, offset + weight.double(), EPS)


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """By complex numbers."""
    turns = torch.complex(angles[0].double(), angles[1].double())
    by = torch.complex(x[..., :TURNING], x[..., TURNING : 2 * TURNING]) * turns
    return torch.cat([by.real, by.imag, x[..., 2 * TURNING :]], -1)


def expected(
    block: AttentionBlock,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    prefix: Prefix,
    own: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """What the block gives, and the newest keys and values."""
    qkv = normed(x[:, 0], block.norm.weight, block.norm.offset) @ block.qkv.double().T
    qkv = qkv if block.bias is None else qkv + block.bias.double()
    queries, keys, values = qkv.view(len(x), GROUPS, HEADS + 2, WIDTH).split([HEADS, 1, 1], 2)
    if block.head_norms is not None:
        queries, keys = (
            normed(part, weight, block.norm.offset)
            for part, weight in zip((queries, keys), block.head_norms, strict=True)
        )
    queries, keys = turned(queries, angles) * block.factor, turned(keys, angles)
    own = tuple(x.clone().double() for x in own)  # type: ignore[assignment]
    own[0][:, :, -1], own[1][:, :, -1] = keys[:, :, 0], values[:, :, 0]
    found = attended(queries, prefix, own, block.cap, block.sinks, block.window)
    return found.flatten(1) @ block.out.double().T, keys[:, :, 0], values[:, :, 0]


@pytest.mark.parametrize("changes", [
    {}, {"offset": 1, "factor": 0.5}, {"bias": True}, {"head_norms": True, "offset": 1}, {"window": 3},
    {"window": 20}, {"cap": 2.0}, {"sinks": True},
], ids=lambda changes: "-".join(changes) or "plain")  # fmt: skip
def test_attention_with_its_projections(changes: dict[str, float]) -> None:
    _, prefix, own = prefix_case(torch.float32, (GROUPS, HEADS, WIDTH), (33, 7))
    own[0][:, :, -1], own[1][:, :, -1] = math.nan, math.nan  # to be written
    block = AttentionBlock(
        NormWeight(torch.randn(HIDDEN), EPS, int(changes.get("offset", 0))),
        torch.randn(GROUPS * (HEADS + 2) * WIDTH, HIDDEN) / 10,
        torch.randn(GROUPS * (HEADS + 2) * WIDTH) if "bias" in changes else None,
        (torch.randn(WIDTH), torch.randn(WIDTH)) if "head_norms" in changes else None,
        torch.randn(HIDDEN, GROUPS * HEADS * WIDTH) / 10,
        GROUPS,
        HEADS,
        changes.get("factor", 1.0),
        changes.get("cap"),
        torch.randn(GROUPS * HEADS) if "sinks" in changes else None,
        int(changes["window"]) if "window" in changes else None,
    )
    x, angle = torch.randn(9, 1, HIDDEN), torch.randn(TURNING)
    angles, before = (angle.cos(), angle.sin()), [memory[:, :, :-1].clone() for memory in own]
    assert block.has(x)
    found, keys, values = expected(block, x, angles, prefix, own)
    given = x.clone()
    torch.testing.assert_close(block(x, angles, 1, prefix, own)[:, 0].double(), found, rtol=2e-5, atol=2e-5)
    for memory, older, newest in zip(own, before, (keys, values), strict=True):
        assert torch.equal(memory[:, :, :-1], older)
        torch.testing.assert_close(memory[:, :, -1].double(), newest, rtol=2e-5, atol=2e-5)
    assert torch.equal(x, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_attention_is_bitwise_what_single_operations_make(dtype: torch.dtype) -> None:
    """Whichever of the two a row meets while others end."""
    _, prefix, own = prefix_case(dtype, (GROUPS, HEADS, WIDTH), (33, 7))
    qkv = (torch.randn(GROUPS * (HEADS + 2) * WIDTH, HIDDEN) / 10).to(dtype)
    out = (torch.randn(HIDDEN, GROUPS * HEADS * WIDTH) / 10).to(dtype)
    weight, bias = torch.randn(HIDDEN).to(dtype), torch.randn(len(qkv)).to(dtype)
    block = AttentionBlock(NormWeight(weight, EPS, 0), qkv, bias, None, out, GROUPS, HEADS, 0.5)
    x, angle = torch.randn(9, 1, HIDDEN).to(dtype), torch.randn(TURNING)
    assert block.has(x)
    angles, newest = (angle.cos().to(dtype), angle.sin().to(dtype)), (own[0][:, :, -1], own[1][:, :, -1])
    made = linear(norm.normed(x, weight, EPS, 0), qkv, bias).view(9, GROUPS, HEADS + 2, WIDTH)
    queries = place(made[:, :, :-1], made[:, :, -1], angles, newest, 0.5)
    expected = linear(attend_newest(queries, 1, prefix, own).view(9, 1, -1), out)
    written = [memory.clone() for memory in own]
    for memory in own:
        memory[:, :, -1] = math.nan
    assert torch.equal(block(x, angles, 1, prefix, own), expected)
    assert all(torch.equal(*pair) for pair in zip(own, written, strict=True))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [(1, 1), (3, 7), (40, 1)])
def test_mlps(tokens: tuple[int, int], activation: Activation, offset: int) -> None:
    ffn, x = 48, torch.randn(*tokens, HIDDEN)
    up, down = torch.randn(2 * ffn, HIDDEN) / 10, torch.randn(HIDDEN, ffn) / 10
    block = MlpBlock(NormWeight(torch.randn(HIDDEN), EPS, offset), up, down, activation)
    gate, by = (normed(x, block.norm.weight, offset) @ up.double().T).chunk(2, -1)
    active = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    assert block.has(x)
    wanted = (active * by) @ down.double().T
    torch.testing.assert_close(block(x).double(), wanted, rtol=2e-5, atol=2e-5)


def test_in_bf16_each_step_is_rounded_once() -> None:
    """As by single operations: a step more or less would be another result."""
    ffn, x = 64, torch.randn(11, 1, HIDDEN).bfloat16()
    up, down = (torch.randn(2 * ffn, HIDDEN) / 10).bfloat16(), (torch.randn(HIDDEN, ffn) / 10).bfloat16()
    block = MlpBlock(NormWeight(torch.randn(HIDDEN).bfloat16(), EPS, 0), up, down, "silu")
    assert block.has(x)
    inner = normed(x, block.norm.weight, 0).bfloat16().double() @ up.double().T
    gate, by = inner.bfloat16().double().chunk(2, -1)
    wanted = (silu(gate) * by).bfloat16().double() @ down.double().T
    torch.testing.assert_close(block(x).double(), wanted, rtol=2**-7, atol=2**-7)


def test_many_tokens_are_not_for_them() -> None:
    ones = NormWeight(torch.ones(HIDDEN), EPS, 0)
    block = MlpBlock(ones, torch.ones(64, HIDDEN), torch.ones(HIDDEN, 32), "silu")
    assert block.has(torch.ones(64, 1, HIDDEN)) and not block.has(torch.ones(5, 13, HIDDEN))
    assert not block.has(torch.ones(1, 1, HIDDEN, dtype=torch.float64))
