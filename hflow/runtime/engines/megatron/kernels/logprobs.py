"""Softmax over a large vocabulary, of which the logits are read once, and its gradient."""

# Triton may not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.runtime.engines.megatron.kernels import jit

BLOCK = 4096  # words of one step, or of one program


def sums(logits: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of z, the logits ``[tokens, words]`` by the temperature: the greatest, the sum of exp z', and of
    z' exp z', where z' = z - greatest; float32 ``[tokens]`` each, the last 0 without `entropy`."""
    logits = logits.contiguous()
    found = torch.zeros(3, len(logits), device=logits.device)
    if logits.numel():
        words = logits.shape[1]
        _sums[(len(logits),)](logits, *found.unbind(), words, temperature, entropy, _block(words))
    top, total, spread = found.unbind()
    return top, total, spread


def to_logits(
    logits: Tensor,
    log_total: Tensor,
    to_log_prob: Tensor,
    columns: Tensor,
    mine: Tensor,
    to_entropy: Tensor | None,
    entropy: Tensor,
    temperature: float,
    in_place: bool = False,
) -> Tensor:
    """See `hflow.runtime.engines.megatron.logprobs.to_logits`; `log_total`: log of the sum of exp z;
    `in_place`: the result takes the place of the logits, which nobody needs any more."""
    logits = logits.contiguous()
    found = logits if in_place else torch.empty_like(logits)
    tokens, words = logits.shape
    if found.numel():
        block = _block(words)
        of_tokens = [x.contiguous() for x in (log_total, to_log_prob, columns, mine.to(torch.int8), entropy)]
        spread = to_log_prob if to_entropy is None else to_entropy.contiguous()
        _to_logits[(tokens, triton.cdiv(words, block))](
            logits, *of_tokens, spread, found, words, temperature, to_entropy is not None, block
        )
    return found


def _block(words: int) -> int:
    return min(BLOCK, triton.next_power_of_2(words))


@jit
def _sums(logits, top, total, spread, words, temperature, entropy: tl.constexpr, block: tl.constexpr):
    """One token, whose sums are kept relative to the greatest z so far."""
    row = tl.program_id(0).to(tl.int64)
    highest, added, weighted = -float("inf"), 0.0, 0.0
    for first in range(0, words, block):
        at = first + tl.arange(0, block)
        z = (
            tl.load(logits + row * words + at, mask=at < words, other=-float("inf")).to(tl.float32)
            / temperature
        )
        higher = tl.maximum(highest, tl.max(z, 0))
        lowered = highest - higher
        scale = tl.exp(lowered)
        e = tl.exp(z - higher)
        if entropy:
            # before the first block `highest` is -inf, and nothing has been added
            before = tl.where(added > 0, weighted + lowered * added, 0.0)
            weighted = before * scale + tl.sum(tl.where(e > 0, (z - higher) * e, 0.0), 0)
        added = added * scale + tl.sum(e, 0)
        highest = higher
    tl.store(top + row, highest)
    tl.store(total + row, added)
    if entropy:
        tl.store(spread + row, weighted)


@jit
def _to_logits(
    logits, log_total, to_log_prob, columns, mine, entropy, to_entropy, out, words, temperature,
    of_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    z = tl.load(logits + row * words + at, mask=at < words, other=0.0).to(tl.float32) / temperature
    log_p = z - tl.load(log_total + row)
    p = tl.exp(log_p)
    to_chosen = tl.load(to_log_prob + row)
    is_chosen = (at == tl.load(columns + row)) & (tl.load(mine + row) != 0)
    gradient = tl.where(is_chosen, to_chosen, 0.0) - p * to_chosen
    if of_entropy:
        gradient -= p * (log_p + tl.load(entropy + row)) * tl.load(to_entropy + row)
    tl.store(out + row * words + at, gradient / temperature, mask=at < words)
