"""What a model says about given responses: a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hflow.plan.packing import TokenBudget
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.predicted import predicted
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.megatron.shared_forward import SharedForward

Read = Callable[[Tensor, MicroBatch], Tensor]


def score(
    model: torch.nn.Module,
    groups: Groups,
    sequences: Sequences,
    budget: TokenBudget,
    temperature: float,
    sp: bool = False,
    shared: SharedForward | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Log-probability of every response token and entropy of the distribution it is drawn from, over its kept
    set if there is one.

    Args:
        budget: of a micro-batch.
        shared: the forward pass that is also that of an update, of some of the rows.

    Returns:
        float32 ``[response tokens]`` each, row by row, on the ranks of the last pipeline stage; None on
        the others.
    """

    def read(hidden: Tensor, batch: MicroBatch) -> Tensor:
        matrix, of, own = OutputMatrix.of(model), batch.sequences, batch.pack.own
        kept = None if of.kept_ids is None else own(of.kept_ids)
        return torch.stack(predicted(hidden, matrix, own(of.targets), temperature, kept=kept), 1)

    found = _at_responses(model, groups, sequences, budget, read, sp, shared)
    return None if found is None else (found[0], found[1])


def judge(
    model: torch.nn.Module,
    groups: Groups,
    sequences: Sequences,
    budget: TokenBudget,
    sp: bool = False,
    shared: SharedForward | None = None,
) -> tuple[Tensor, Tensor] | None:
    """What a model with a scalar head gives before every response token, and after the whole row.

    Args:
        budget, shared: see `score`.

    Returns:
        float32 values ``[response tokens]``, row by row, at the positions that predict the tokens, and
        scores ``[rows]``, at each row's last token; on the ranks of the last pipeline stage, else None.
    """
    numbers_only: Read = lambda numbers, _: numbers  # noqa: E731
    found = _at_responses(model, groups, sequences.extended(), budget, numbers_only, sp, shared)
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
    budget: TokenBudget,
    read: Read,
    sp: bool,
    shared: SharedForward | None,
) -> Tensor | None:
    """``[kinds, response tokens]``: what `read` makes of the head's outputs, ``[predicted, kinds]`` of those
    that a rank predicts."""

    def finish(outputs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return outputs.new_zeros(()), batch.pack.whole(read(outputs, batch)).T

    batches, parts = shared.run(sequences, finish) if shared else ((), [])
    rows = torch.arange(len(sequences), device=sequences.tokens.device)
    rows = shared.others(rows) if shared else rows
    if len(rows) or not shared:
        others = micro_batches(
            sequences, rows, budget, same_shape=groups.pp.size() > 1, in_step=groups.ep, cp=groups.cp,
            multiple=groups.tp.size() if sp else 1,
        )  # fmt: skip
        model.eval()
        parts += run_schedule(model, groups, others, finish, forward_only=True, sp=sp)
        batches += others
    if not groups.last_stage:
        return None
    found, order = torch.cat(parts, 1), torch.cat([batch.rows for batch in batches])
    mask = sequences.response_mask
    number = torch.zeros_like(mask, dtype=torch.int64)
    number[mask] = torch.arange(found.shape[1], device=found.device)
    in_order = torch.empty_like(found)
    in_order[:, number[order][mask[order]]] = found
    return in_order
