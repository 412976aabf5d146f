"""Kernels in Triton beside float64 and torch's operations: how far apart, and how many microseconds."""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from hflow.runtime.engines.megatron import logprobs
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

CLOSE = 5e-3  # of norms: bf16 rounds once, by 2^-9 at most
ATTENDED = (  # rows, groups, heads, keys, width
    (16, 2, 6, 512, 128), (16, 2, 6, 4352, 128), (64, 8, 4, 2048, 128), (4, 8, 4, 16384, 128),
    (8, 1, 32, 2048, 64), (4, 4, 2, 2048, 256),
)  # fmt: skip
WIDTH = 128


def run(setting: Setting) -> Figures:
    if not setting.on_gpu:
        raise Skipped("tests/engines/test_kernels.py has Triton's interpreter run them on a CPU")
    torch.manual_seed(0)
    figures = {"gated": _gated(), "rotary": _rotary(), "logprobs": _logprobs()}
    for sizes in ATTENDED:
        figures["newest " + " x ".join(map(str, sizes))] = _newest(*sizes)
    far = [name for name, found in figures.items() if max(found["apart"]) > CLOSE]
    need(not far, f"far from float64: {', '.join(far)}", figures)
    return figures


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _apart(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def _microseconds(*actions: Callable[[], object]) -> list[float]:
    from triton import testing

    bench: Any = testing.do_bench
    return [round(1e3 * bench(each, warmup=5, rep=20, return_mode="median"), 1) for each in actions]


def _gated() -> Figures:
    from hflow.runtime.engines.megatron.kernels.gated import gradient, product

    x, upstream = _normal(8192, 2 * 8960), _normal(8192, 8960)
    gate, up = (part.double().requires_grad_() for part in x.chunk(2, -1))
    expected = silu(gate) * up
    expected.backward(upstream.double())
    assert gate.grad is not None and up.grad is not None
    both = torch.cat([gate.grad, up.grad], -1)
    apart = [_apart(product(x, "silu"), expected), _apart(gradient(upstream, x, "silu"), both)]
    times = _microseconds(lambda: product(x, "silu"), lambda: gradient(upstream, x, "silu"))
    return {"apart": apart, "microseconds": times}


def _rotary() -> Figures:
    from hflow.runtime.engines.megatron.kernels.rotary import turned

    x, angles = _normal(8192, 16, WIDTH)[:, :12], torch.randn(8192, WIDTH // 2, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    (a, b), c, s = x.double().chunk(2, -1), cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat([a * c - b * s, b * c + a * s], -1)
    times = _microseconds(lambda: turned(x, cos, sin, 1))
    return {"apart": [_apart(turned(x, cos, sin, 1), expected)], "microseconds": times}


def _logprobs() -> Figures:
    from hflow.runtime.engines.megatron.kernels.logprobs import sums, to_logits

    tokens, words, temperature = 2048, 151936, 0.9
    logits, group = 4 * _normal(tokens, words), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    columns = torch.randint(words, (tokens,), device="cuda")
    mine = torch.ones(tokens, dtype=torch.bool, device="cuda")
    given: Any = logits, columns, mine, group, temperature, True
    expected, found = logprobs._sums(*given), logprobs._sums_by_kernel(*given)
    total, _, spread = found[1]
    log_total, entropy = found[0] + total.log(), total.log() - spread / total
    to_log_prob, to_entropy = torch.randn(2, tokens, device="cuda")
    of_tokens = log_total, to_log_prob, columns, mine, to_entropy, entropy
    some = slice(64)
    log_p = (logits[some].double() / temperature).sub_(log_total[some, None])
    to_chosen = to_log_prob[some].double(), columns[some], mine[some]
    to_spread = to_entropy[some].double(), entropy[some]
    slope = logprobs.to_logits(log_p, to_chosen, to_spread).div_(temperature)
    gradient = to_logits(logits, *of_tokens, temperature)
    times = _microseconds(
        lambda: sums(logits, temperature, True),
        lambda: to_logits(logits, *of_tokens, temperature),
        lambda: logprobs._sums(*given),
    )
    apart = [_apart(*pair) for pair in zip(found, expected)] + [_apart(gradient[some], slope)]
    return {"apart": apart, "microseconds": times[:2], "microseconds_of_torch": times[2:]}


def _newest(rows: int, groups: int, heads: int, places: int, width: int) -> Figures:
    from hflow.runtime.engines.megatron.kernels.newest import attend_newest

    query = _normal(rows, groups, heads, width)
    key, value = _normal(2, rows, groups, places + 256, width)[:, :, :, :places]
    present = torch.ones(rows, places, dtype=torch.bool, device="cuda")
    present[:, :5] = present[:, places - 70 :] = False
    mask = present[:, None, None]
    numbers = torch.zeros(mask.shape, dtype=query.dtype, device="cuda").masked_fill_(~mask, -torch.inf)
    exact = scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask)
    times = _microseconds(
        lambda: attend_newest(query, key, value, present),
        lambda: scaled_dot_product_attention(query, key, value, attn_mask=numbers),
    )
    apart = [_apart(attend_newest(query, key, value, present), exact)]
    return {"apart": apart, "microseconds": times[:1], "microseconds_of_torch": times[1:]}


if __name__ == "__main__":
    main(run)
