"""Log-probabilities and entropy of given responses: a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.groups import Groups
from hflow.runtime.engines.megatron.logprobs import log_probs
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import MicroBatch, Sequences, micro_batches


@torch.no_grad()
def score(
    model: torch.nn.Module, groups: Groups, sequences: Sequences, micro_batch: int, temperature: float
) -> tuple[Tensor, Tensor] | None:
    """Log-probability of every response token and entropy of the distribution it is drawn from.

    Returns:
        float32 ``[response tokens]`` each, row by row, on the ranks of the last pipeline stage; None on
        the others.
    """
    everyone = torch.arange(len(sequences), device=sequences.tokens.device)
    batches = micro_batches(sequences, everyone, micro_batch, same_shape=groups.pp.size() > 1)

    def finish(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        values = log_probs(logits, batch.sequences.targets, groups.tp, temperature)
        return logits.new_zeros(()), torch.stack(values)

    model.eval()
    parts = run_schedule(model, groups, batches, finish, forward_only=True)
    if not groups.last_stage:
        return None
    scored, entropy = torch.cat(parts, 1)
    return scored, entropy
