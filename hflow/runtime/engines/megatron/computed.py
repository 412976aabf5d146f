"""What a loss reads of the model that is trained: log-probs and entropies, or values and scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.loss import Loss
from hflow.runtime.engines.megatron.micro_batches import MicroBatch
from hflow.runtime.engines.megatron.predicted import predicted
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import length_mask

SCORE = "score"


@dataclass(frozen=True)
class Computed:
    """`wanted`: the inputs of a loss that a train node computes of `model`. `temperature`: at which log-probs
    are taken. `to_the_end`: rows have a place after their last token, too, where a scalar head gives their
    score."""

    wanted: frozenset[str]
    model: torch.nn.Module
    temperature: float
    to_the_end: bool

    @staticmethod
    def of(loss: Loss, model: torch.nn.Module, shared: bool) -> Computed:
        """What `loss` reads. `shared`: a score node has one forward pass with it, and that one always has
        scores."""
        wanted = frozenset(loss.computed)
        to_the_end = SCORE in wanted or (shared and "values" in wanted)
        return Computed(wanted, model, loss.temperature, to_the_end)

    def places(self, sequences: Sequences) -> Sequences:
        """The rows to run."""
        return sequences.extended() if self.to_the_end else sequences

    def width(self, sequences: Sequences) -> int:
        """The longest response among rows that `places` gave."""
        longest = sequences.response_mask.shape[1]
        return max(longest - 1, 0) if self.to_the_end else longest

    def __call__(self, heads: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """By name, of rows that `places` gave; 0 where a row has no token. The same on every context-parallel
        rank, and collective over these.

        Args:
            heads: what the last stage has at this rank's places that predict responses, hidden states
                ``[tokens, hidden]`` or values ``[tokens, 1]``, row by row.

        Returns:
            float32 ``[rows, width]``, but for scores, ``[rows]``; with gradients to `heads`.
        """
        sequences, pack = batch.sequences, batch.pack
        response = sequences.response_mask
        if not self.wanted & {"values", SCORE}:
            found = predicted(
                heads,
                OutputMatrix.of(self.model),
                pack.own(sequences.targets),
                self.temperature,
                "entropy" in self.wanted,
                None if sequences.kept_ids is None else pack.own(sequences.kept_ids),
            )
            named = zip(("logprobs", "entropy"), found)
            return {
                name: _padded(pack.whole(values), response) for name, values in named if name in self.wanted
            }
        numbers = _padded(pack.whole(heads.squeeze(1)), response)
        if not self.to_the_end:
            return {"values": numbers}
        lengths, width = sequences.response_lengths - 1, self.width(sequences)
        # One column more, for rows without any place: those that fill up a micro-batch of no rows.
        last = torch.nn.functional.pad(numbers, (0, 1)).gather(1, lengths.clamp(min=0)[:, None])[:, 0]
        values = numbers[:, :width].masked_fill(~length_mask(lengths, width), 0)
        return {name: x for name, x in (("values", values), (SCORE, last)) if name in self.wanted}


def _padded(values: Tensor, present: Tensor) -> Tensor:
    """``[tokens]`` as ``[rows, longest]``, 0 where there is no token."""
    return values.new_zeros(present.shape).masked_scatter(present, values)
