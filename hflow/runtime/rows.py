"""Rows of one value on one device: how data edges look inside a worker.

A dense value is a tensor ``[rows, ...]``. A ragged one is its elements without padding plus a length
per row. Strings are ragged UTF-8 bytes. Nothing is ever padded on the wire; `padded()` is what ops
and engines see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TORCH_DTYPES = {
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "bool": torch.bool,
    "str": torch.uint8,
}


@dataclass(frozen=True)
class Rows:
    """`values`: ``[rows]`` (dense) or ``[sum(lengths)]`` (ragged); `lengths`: int64 ``[rows]``.

    `versions`: int64 ``[rows]``, of the oldest weights that sampled a text (`worker.staleness`); None where
    nobody tells.
    """

    values: Tensor
    lengths: Tensor | None = None
    versions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values if self.lengths is None else self.lengths)

    def slice(self, start: int, stop: int) -> Rows:
        """Rows [start, stop), counted locally; a view."""
        versions = None if self.versions is None else self.versions[start:stop]
        if self.lengths is None:
            return Rows(self.values[start:stop], None, versions)
        ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        return Rows(self.values[ends[start] : ends[stop]], self.lengths[start:stop], versions)

    def take(self, rows: Tensor) -> Rows:
        """The rows with the given numbers (int64, local), in that order; repetitions allowed."""
        versions = None if self.versions is None else self.versions[rows]
        if self.lengths is None:
            return Rows(self.values[rows], None, versions)
        starts, lengths = self.lengths.cumsum(0) - self.lengths, self.lengths[rows]
        return Rows(self.values[_places(starts[rows], lengths)], lengths, versions)

    @property
    def row_lengths(self) -> Tensor:
        """`lengths`, of ragged values."""
        assert self.lengths is not None, "dense rows have no lengths"
        return self.lengths

    def padded(self, fill: float = 0, width: int | None = None) -> Tensor:
        """``[rows, width or longest]``, right-padded. Only for ragged values."""
        longest = int(self.row_lengths.max()) if len(self) else 0
        out = self.values.new_full((len(self), width or longest), fill)
        out[length_mask(self.row_lengths, out.shape[1])] = self.values
        return out

    def lists(self) -> list[list[int]]:
        """The elements of every row. Only for ragged values."""
        return [row.tolist() for row in self.values.split(self.row_lengths.tolist())]

    def strings(self) -> list[str]:
        data = self.values.numpy().tobytes()
        out, at = [], 0
        for length in self.row_lengths.tolist():
            out.append(data[at : at + length].decode())
            at += length
        return out


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """bool ``[rows, width]``: True on the first `lengths[row]` places."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def from_padded(padded: Tensor, lengths: Tensor) -> Rows:
    """The ragged rows in a right-padded ``[rows, width]`` tensor."""
    return Rows(padded[length_mask(lengths, padded.shape[1])], lengths.to(torch.int64))


def from_lists(rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> Rows:
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
    return Rows(torch.tensor([x for row in rows for x in row], dtype=dtype), lengths)


def from_strings(texts: Sequence[str]) -> Rows:
    data = [t.encode() for t in texts]
    lengths = torch.tensor([len(d) for d in data], dtype=torch.int64)
    return Rows(torch.tensor(list(b"".join(data)), dtype=torch.uint8), lengths)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows of all parts, in order; parts are alike in what they tell."""
    return Rows(
        torch.cat([p.values for p in parts]),
        _all([p.lengths for p in parts]),
        _all([p.versions for p in parts]),
    )


def _all(parts: Sequence[Tensor | None]) -> Tensor | None:
    told = [p for p in parts if p is not None]
    return torch.cat(told) if len(told) == len(parts) else None


def joined(*parts: Rows) -> Rows:
    """Row i is row i of every part, one after the other. Only for ragged values of one dtype."""
    lengths = torch.stack([p.lengths for p in parts if p.lengths is not None])
    total = lengths.sum(0)
    ends = total.cumsum(0) - total + lengths.cumsum(0)
    values = parts[0].values.new_empty(int(total.sum()))
    for part, end, length in zip(parts, ends, lengths):
        values[_places(end - length, length)] = part.values
    return Rows(values, total)


def _places(starts: Tensor, lengths: Tensor) -> Tensor:
    """``start, start + 1, …`` of every row, one row after the other; int64 ``[sum(lengths)]``."""
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - first).repeat_interleave(lengths)


def row_of(lengths: Tensor, element: int) -> int:
    """The row that holds `element` of ragged values, which lie row by row."""
    return int(torch.searchsorted(lengths.cumsum(0), element, right=True))
