"""Rows of prompt and response, cut into micro-batches.

Response token j of a row is predicted at position prompt_length + j - 1, so the last token of a row is
never an input, and only positions that predict response tokens need logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hflow.runtime.rows import Rows, length_mask


@dataclass(frozen=True)
class Sequences:
    """`tokens`: int64 ``[rows, longest]``, right-padded; lengths: int64 ``[rows]``."""

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor

    @staticmethod
    def of(tokens: Rows, mask: Rows, device: torch.device) -> Sequences:
        """From ragged tokens (prompt followed by response) and a ragged mask of the response.

        Raises:
            ValueError: a row has no prompt, so that nothing predicts its first response token.
        """
        assert tokens.lengths is not None and mask.lengths is not None
        prompts = tokens.lengths - mask.lengths
        if len(prompts) and int(prompts.min()) < 1:
            raise ValueError("a row has no prompt before its response")
        padded = tokens.padded().to(device, torch.int64)
        return Sequences(padded, prompts.to(device), mask.lengths.to(device))

    def __len__(self) -> int:
        return len(self.tokens)

    def width(self) -> int:
        """Positions that the longest row takes as inputs; at least 1."""
        if len(self) == 0:
            return 1
        return max(1, int((self.prompt_lengths + self.response_lengths).max()) - 1)

    def take(self, rows: Tensor, width: int | None = None) -> Sequences:
        """The given rows, cut or padded so that they take `width` inputs (default: as few as they need)."""
        part = Sequences(self.tokens[rows], self.prompt_lengths[rows], self.response_lengths[rows])
        total = (part.width() if width is None else width) + 1
        short = total - part.tokens.shape[1]
        tokens = torch.nn.functional.pad(part.tokens, (0, short)) if short > 0 else part.tokens[:, :total]
        return Sequences(tokens, part.prompt_lengths, part.response_lengths)

    def extended(self) -> Sequences:
        """Each row with one more, arbitrary token: it would be predicted at what was the row's last token.

        So what a model gives at the response's places becomes what it gives before every response token,
        followed by what it gives after the whole row.
        """
        tokens = torch.nn.functional.pad(self.tokens, (0, 1))
        return Sequences(tokens, self.prompt_lengths, self.response_lengths + 1)

    def with_empty_rows(self, count: int) -> Sequences:
        """`count` rows more, of zeros and without response."""
        pad = lambda t: torch.cat([t, t.new_zeros(count, *t.shape[1:])])  # noqa: E731
        return Sequences(pad(self.tokens), pad(self.prompt_lengths), pad(self.response_lengths))

    @property
    def inputs(self) -> Tensor:
        """int64 ``[rows, longest - 1]``."""
        return self.tokens[:, :-1]

    @cached_property
    def response_mask(self) -> Tensor:
        """bool ``[rows, longest response]``: True where a row has a response token."""
        longest = int(self.response_lengths.max()) if len(self) else 0
        return length_mask(self.response_lengths, longest)

    @cached_property
    def predicted_at(self) -> tuple[Tensor, Tensor]:
        """Row and position that predict each response token, row by row; int64 ``[tokens]`` each."""
        rows, offsets = self.response_mask.nonzero(as_tuple=True)
        return rows, self.prompt_lengths[rows] + offsets - 1

    @cached_property
    def targets(self) -> Tensor:
        """The response tokens, row by row; int64 ``[tokens]``."""
        rows, positions = self.predicted_at
        return self.tokens[rows, positions + 1]


@dataclass(frozen=True)
class MicroBatch:
    """`rows`: int64, which rows of the whole these are; `sequences` may have empty rows after them."""

    rows: Tensor
    sequences: Sequences


def micro_batches(
    sequences: Sequences, rows: Tensor, limit: int, same_shape: bool, unit: int = 1
) -> tuple[MicroBatch, ...]:
    """Cut `rows` of `sequences` into the fewest micro-batches of at most `limit` rows; at least one.

    They are as even as possible, and hold whole groups of `unit` rows. Pipeline stages exchange tensors of
    one shape, so with `same_shape` all have equally many rows and inputs, by padding.
    """
    assert limit >= unit and len(rows) % unit == 0, (limit, len(rows), unit)
    groups = len(rows) // unit
    count = max(1, -(-groups // (limit // unit)))
    size = max(1, -(-groups // count)) * unit
    width = sequences.take(rows).width() if same_shape else None
    found = []
    for i in range(count):
        part = rows[i * size : (i + 1) * size]
        taken = sequences.take(part, width)
        missing = size - len(part) if same_shape else unit * (len(part) == 0)
        found.append(MicroBatch(part, taken.with_empty_rows(missing) if missing else taken))
    return tuple(found)
