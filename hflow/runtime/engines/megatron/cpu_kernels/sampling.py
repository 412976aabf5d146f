"""Sampling of tokens from logits: torch makes a dozen passes over the vocabulary, most of them in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.cpu_kernels.library import call


def sample(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As `hflow.runtime.sampling.sample`, of logits that are finite or minus infinity."""
    logits, u, (rows, width) = logits.contiguous(), u.contiguous(), logits.shape
    assert u.dtype == torch.float64 and u.shape == (rows,)
    tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    call("sample", logits, logits, u, tokens, log_probs, rows, width, temperature)
    return tokens, log_probs
