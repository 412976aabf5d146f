"""Rows of a pack by the prompts that they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.sequences import Sequences


@dataclass(frozen=True)
class PromptGroups:
    """Where the tokens of rows are, in a pack that has every prompt once, and responses without their last
    tokens; on the host.

    Attributes:
        rows: int64 ``[rows, 4]``, those of a prompt after each other: where the prompt begins and how many
            tokens it has, and the same of the response.
        starts: int64 ``[prompts + 1]``: where the rows of each prompt begin in `rows`, and their number.
        longest: the tokens of the longest row.
        tokens: those of all prompts and responses.
    """

    rows: Tensor
    starts: Tensor
    longest: int
    tokens: int

    @staticmethod
    def of(sequences: Sequences) -> PromptGroups:
        """In the order of `RowPlaces`: all prompts, then all responses."""
        prompts, first = sequences.prompt_lengths.cpu(), sequences.same_prompt.cpu()
        responses = (sequences.response_lengths.cpu() - 1).clamp(min=0)
        once = prompts * (first == torch.arange(len(first)))
        prompt_at, response_at = once.cumsum(0) - once, once.sum() + responses.cumsum(0) - responses
        table = torch.stack([prompt_at[first], prompts, response_at, responses], 1)
        _, counts = first.unique(return_counts=True)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        longest = int((prompts + responses).max()) if len(first) else 0
        in_order = table[first.argsort(stable=True)].contiguous()
        return PromptGroups(in_order, starts, longest, int((once + responses).sum()))

    def __len__(self) -> int:
        return len(self.starts) - 1
