"""Kept sets: for every token of a response the ids of the tokens among which it was chosen.

A value ``i32[rows, resp~, kept~]`` has a length per row and, within, one per token. A row of `Rows` holds
first the number of ids of each of its tokens, then all ids, token after token. So rows are moved and cut like
any other ragged ones, and whoever knows how long the responses are can read them.

A token that no model chose, of an observation or of a row that is dropped, has an empty set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.rows import Rows, length_mask

ABSENT = -1  # in padded sets


@dataclass(frozen=True)
class KeptSets:
    """`rows`: as they are moved. `lengths`: int64 ``[rows]``, of the responses."""

    rows: Rows
    lengths: Tensor

    @staticmethod
    def of(counts: Tensor, ids: Tensor, lengths: Tensor) -> KeptSets:
        """From the sizes of the sets, int64 ``[tokens]``, row by row, and all ids, ``[sum of counts]``."""
        total = _per_row(counts, lengths)
        values = torch.empty(int(lengths.sum() + total.sum()), dtype=torch.int32)
        is_count = _is_count(lengths + total, lengths)
        values[is_count], values[~is_count] = counts.to(torch.int32), ids.to(torch.int32)
        return KeptSets(Rows(values, lengths + total), lengths)

    @staticmethod
    def empty(lengths: Tensor) -> KeptSets:
        """Of responses that no model chose."""
        none = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        return KeptSets.of(none, none[:0], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def counts(self) -> Tensor:
        """The sizes of the sets, int64 ``[tokens]``, row by row."""
        return self.rows.values[self._is_count].to(torch.int64)

    @property
    def ids(self) -> Tensor:
        """Of all sets, int32 ``[sum of counts]``, token after token."""
        return self.rows.values[~self._is_count]

    @property
    def _is_count(self) -> Tensor:
        return _is_count(self.rows.row_lengths, self.lengths)

    def take(self, rows: Tensor) -> KeptSets:
        """The given rows, int64, on any device."""
        rows = rows.cpu()
        return KeptSets(self.rows.take(rows), self.lengths[rows])

    def without(self, dropped: Tensor) -> KeptSets:
        """With empty sets in the rows for which `dropped`, bool ``[rows]``, is true."""
        if not dropped.any():
            return self
        counts = self.counts
        gone = dropped.repeat_interleave(self.lengths)
        ids = self.ids[~gone.repeat_interleave(counts)]
        return KeptSets.of(counts.where(~gone, 0), ids, self.lengths)

    def padded(self) -> Tensor:
        """int64 ``[tokens, largest set, at least 1]``, ``ABSENT`` where a set is smaller."""
        counts = self.counts
        width = max(1, int(counts.max()) if len(counts) else 0)
        out = torch.full((len(counts), width), ABSENT, dtype=torch.int64)
        out[length_mask(counts, width)] = self.ids.to(torch.int64)
        return out


def joined_sets(parts: Sequence[KeptSets]) -> KeptSets:
    """Of responses that follow one another, row by row."""
    lengths = torch.stack([part.lengths for part in parts])
    counts = torch.cat([part.counts for part in parts])
    # Where each token of each part comes in the rows: first by row, then by part.
    rows = torch.cat([torch.arange(len(part)).repeat_interleave(part.lengths) for part in parts])
    order = rows.argsort(stable=True)
    of_ids = rows.repeat_interleave(counts).argsort(stable=True)
    ids = torch.cat([part.ids for part in parts])
    return KeptSets.of(counts[order], ids[of_ids], lengths.sum(0))


def _per_row(counts: Tensor, lengths: Tensor) -> Tensor:
    """Sums over the tokens of each row."""
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros_like(lengths).index_add_(0, rows, counts.to(torch.int64))


def _is_count(lengths: Tensor, responses: Tensor) -> Tensor:
    """bool, of each value of rows with these `lengths`: whether it is the size of a set."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return place < responses.repeat_interleave(lengths)


class KeptCollector:
    """Gathers the sets of rows that are sampled token by token."""

    def __init__(self, rows: int, most: int):
        """`most`: ids in a set. A row with a larger one overflows: it has empty sets."""
        self._most = most
        self._overflown = torch.zeros(rows, dtype=torch.bool)
        self._lengths = torch.zeros(rows, dtype=torch.int64)
        self._rows: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, rows: Tensor, kept: Tensor) -> None:
        """One more token of each of the given rows, int64, which was chosen among `kept`, bool
        ``[given rows, vocab]``."""
        counts = kept.sum(-1)
        fits = counts <= self._most
        _, ids = (kept & fits[:, None]).nonzero(as_tuple=True)
        rows, fits = rows.cpu(), fits.cpu()
        self._overflown[rows[~fits]] = True
        self._lengths[rows] += 1
        self._rows.append(rows)
        self._counts.append(counts.cpu().where(fits, 0))
        self._ids.append(ids.cpu())

    def collected(self) -> tuple[KeptSets, Tensor]:
        """The sets so far, and which rows have overflown, bool ``[rows]``."""
        if not self._rows:
            return KeptSets.empty(self._lengths), self._overflown
        rows, counts = torch.cat(self._rows), torch.cat(self._counts)
        order = rows.argsort(stable=True)
        ids = torch.cat(self._ids)[rows.repeat_interleave(counts).argsort(stable=True)]
        return KeptSets.of(counts[order], ids, self._lengths).without(self._overflown), self._overflown
