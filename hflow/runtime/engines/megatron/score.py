"""What a model says about given responses: a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.predicted import predicted
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences


def score(
    model: torch.nn.Module, groups: Groups, sequences: Sequences, micro_batch: int, temperature: float
) -> tuple[Tensor, Tensor] | None:
    """Log-probability of every response token and entropy of the distribution it is drawn from, over its kept
    set if there is one.

    Returns:
        float32 ``[response tokens]`` each, row by row, on the ranks of the last pipeline stage; None on
        the others.
    """

    def read(hidden: Tensor, of: Sequences) -> Tensor:
        matrix = OutputMatrix.of(model)
        return torch.stack(predicted(hidden, matrix, of.targets, temperature, kept=of.kept_ids))

    found = _at_responses(model, groups, sequences, micro_batch, read)
    return None if found is None else (found[0], found[1])


def judge(
    model: torch.nn.Module, groups: Groups, sequences: Sequences, micro_batch: int
) -> tuple[Tensor, Tensor] | None:
    """What a model with a scalar head gives before every response token, and after the whole row.

    Returns:
        float32 values ``[response tokens]``, row by row, at the positions that predict the tokens, and
        scores ``[rows]``, at each row's last token; on the ranks of the last pipeline stage, else None.
    """
    found = _at_responses(model, groups, sequences.extended(), micro_batch, lambda numbers, _: numbers.T)
    if found is None:
        return None
    numbers = found[0]
    ends = (sequences.response_lengths + 1).cumsum(0) - 1
    inside = torch.ones_like(numbers, dtype=torch.bool)
    inside[ends] = False
    return numbers[inside], numbers[ends]


@torch.no_grad()
def _at_responses(
    model: torch.nn.Module,
    groups: Groups,
    sequences: Sequences,
    micro_batch: int,
    read: Callable[[Tensor, Sequences], Tensor],
) -> Tensor | None:
    """``[kinds, response tokens]``: what `read` makes of the head's outputs for the sequences."""
    everyone = torch.arange(len(sequences), device=sequences.tokens.device)
    batches = micro_batches(
        sequences, everyone, micro_batch, same_shape=groups.pp.size() > 1, in_step=groups.ep
    )

    def finish(outputs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return outputs.new_zeros(()), read(outputs, batch.sequences)

    model.eval()
    parts = run_schedule(model, groups, batches, finish, forward_only=True)
    if not groups.last_stage:
        return None
    found, order = torch.cat(parts, 1), torch.cat([batch.rows for batch in batches])
    mask = sequences.response_mask
    number = torch.zeros_like(mask, dtype=torch.int64)
    number[mask] = torch.arange(found.shape[1], device=found.device)
    in_order = torch.empty_like(found)
    in_order[:, number[order][mask[order]]] = found
    return in_order
