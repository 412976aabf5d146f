"""The kernels for CUDA, by Triton's interpreter on the CPU, against what runs where there is no CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with torch for CUDA, and with SGLang")
PROGRAM = """
from types import SimpleNamespace
from unittest.mock import patch
import torch
from torch.nn.functional import scaled_dot_product_attention
from hflow.runtime.engines.megatron import decoder, logprobs, predicted
from hflow.runtime.engines.megatron.gated import GeGLU, SwiGLU
from hflow.runtime.engines.megatron.kernels import gated as gated_kernel, logprobs as logprob_kernel
from hflow.runtime.engines.megatron.kernels import newest as newest_kernel, place as place_kernel
from hflow.runtime.engines.megatron.kernels import rotary as rotary_kernel
from hflow.runtime.engines.megatron.rotary import _turned

torch.manual_seed(0)
for module in (SwiGLU, GeGLU):
    for shape in ((3, 2, 2 * 96), (5, 2 * 1500), (0, 2 * 32)):
        x = (3 * torch.randn(shape)).requires_grad_()
        product = module(None)(x)
        upstream = torch.randn_like(product)
        product.backward(upstream)
        name = module.gate.name
        torch.testing.assert_close(gated_kernel.product(x.detach(), name), product.detach())
        torch.testing.assert_close(gated_kernel.gradient(upstream, x.detach(), name), x.grad)

for tokens, heads, width, half in ((7, 3, 16, 8), (4, 12, 24, 12), (5, 1, 16, 6), (0, 2, 16, 8)):
    whole = torch.randn(tokens, heads + 2, width)
    for x in (whole, whole[:, 1:-1]):  # a part of each token, as queries are
        angles = torch.randn(tokens, half)
        for sign in (1, -1):
            expected = _turned(x, angles.cos()[:, None], angles.sin()[:, None], sign)
            torch.testing.assert_close(rotary_kernel.turned(x, angles.cos(), angles.sin(), sign), expected)
group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
for tokens, words, temperature, entropy in ((5, 40, 1.0, True), (3, 9000, 0.7, True), (4, 5000, 1.3, False)):
    logits = (4 * torch.randn(tokens, words)).requires_grad_()
    columns, mine = torch.randint(words, (tokens,)), torch.arange(tokens) % 2 == 0
    given = columns, mine, group, temperature, entropy
    with patch.object(logprobs, "kernels", lambda _: logprob_kernel):
        by_kernel = logprobs._sums_by_kernel(logits.detach(), *given)
    for found, expected in zip(by_kernel, logprobs._sums(logits.detach(), *given)):
        torch.testing.assert_close(found, expected)
    log_p, spread = logprobs._LogProbs.apply(logits, *given)
    to_log_p, to_spread = torch.randn(2, tokens)
    (log_p @ to_log_p + spread @ to_spread).backward()
    total = (logits.detach() / temperature).logsumexp(-1)
    of_entropy = (to_spread if entropy else None), spread.detach()
    given = total, to_log_p, columns, mine, *of_entropy
    found = logprob_kernel.to_logits(logits.detach(), *given, temperature)
    torch.testing.assert_close(found, logits.grad)
def tiled(hidden, weight, *given):
    hidden, weight.main_grad = hidden.clone().requires_grad_(), torch.zeros_like(weight)
    found = predicted._TiledLogProbs.apply(hidden, weight, *given)
    (found[0] @ torch.arange(len(hidden)).float() + found[1].sum()).backward()
    return *found, hidden.grad, weight.main_grad

hidden, weight = torch.randn(11, 8), torch.randn(37, 8, requires_grad=True)
for temperature, entropy in ((1.0, True), (0.8, False)):
    given = torch.randint(37, (11,)), torch.arange(11) % 3 > 0, group, temperature, entropy, None
    with patch.object(predicted, "tile_side", lambda capped: 6):
        expected = tiled(hidden, weight, *given)
        with patch.object(predicted, "kernels", lambda _: logprob_kernel):
            for found, theirs in zip(tiled(hidden, weight, *given), expected):
                torch.testing.assert_close(found, theirs)

for rows, groups, heads, width, places in ((3, 2, 2, 16, 40), (2, 1, 5, 24, 300), (1, 3, 1, 64, 700)):
    query = torch.randn(rows, groups, heads, width)
    key, value = torch.randn(2, rows, groups, places + 9, width)[:, :, :, :places]
    present = torch.rand(rows, places + 3)[:, :places] < 0.6
    present[:, places // 2] = True
    present[0, : places // 2] = False
    expected = scaled_dot_product_attention(query, key, value, attn_mask=present[:, None, None])
    torch.testing.assert_close(newest_kernel.attend_newest(query, key, value, present), expected)

for heads, width, turning, factor in ((2, 16, 16, 1.0), (1, 24, 12, 0.5), (5, 16, 16, 1.0)):
    x, tables = torch.randn(3, 2, heads + 2, width), torch.randn(2, 11, turning // 2)
    tables = torch.cat([tables[0], tables[0]], -1), torch.cat([-tables[1], tables[1]], -1)
    cache, at = torch.randn(2, 3, 2, 11, width), torch.tensor([7])
    turned = decoder._turned(x[:, None, :, :-1], *(table[at][:, None, None] for table in tables))[:, 0]
    expected = cache.clone()
    expected[:, :, :, 7] = torch.stack([turned[:, :, -1], x[:, :, -1]])
    memory = cache.unbind()
    found = place_kernel.place(x[:, :, :-1], x[:, :, -1], tables, at, memory, factor)
    torch.testing.assert_close(found, factor * turned[:, :, :-1])
    torch.testing.assert_close(cache, expected)
print("equal")
"""


@pytest.mark.slow
def test_kernels_compute_what_torch_does() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
