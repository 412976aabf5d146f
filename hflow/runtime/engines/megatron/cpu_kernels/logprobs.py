"""Softmax over a large vocabulary, of which the logits are read once from memory, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call


def sums(logits: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of z, the logits ``[tokens, words]`` by the temperature: the greatest, the sum of exp z', and of
    z' exp z', where z' = z - greatest; float32 ``[tokens]`` each, the last 0 without `entropy`."""
    logits = logits.contiguous()
    top, total, spread = torch.empty(3, len(logits)).unbind()
    call("softmax", logits, entropy, logits, top, total, spread, *logits.shape, temperature)
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
    numbers = [None if x is None else x.contiguous() for x in (log_total, to_log_prob, to_entropy, entropy)]
    assert all(x is None or x.dtype == torch.float32 for x in numbers)
    assert (columns.dtype, mine.dtype) == (torch.int64, torch.bool)
    log_total_, to_log_prob_, *of_entropy = numbers
    of_tokens = log_total_, to_log_prob_, columns.contiguous(), mine.contiguous(), *of_entropy
    call("softmax_gradient", logits, logits, *of_tokens, found, *logits.shape, temperature)
    return found
