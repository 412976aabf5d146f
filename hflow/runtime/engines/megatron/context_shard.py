"""The part of some rows that a context-parallel rank runs.

Only attention sees more of a row than one token. So the places of a row are dealt to the ranks, each runs its
own through the layers, and for attention the ranks gather the keys and values of all (a reduce-scatter of
their gradients on the way back). They are linear in the length; no scores leave a rank.

A token sees all before it, so later ones are more work. Each row is cut into 2n parts for n ranks, and rank r
has parts r and 2n-1-r: the same number of scores on each (Megatron's and Llama 3's order, arXiv:2407.21783).
Of a prompt that rows share, the first row that has it is cut as a whole, others without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.nn.functional import pad

from hflow.plan.layout import split
from hflow.runtime.engines.megatron.pack import RowPlaces, padded_routes
from hflow.runtime.engines.megatron.sequences import Sequences


@dataclass(frozen=True)
class Queries:
    """Tokens of one row that follow each other and are a rank's own: ``start`` to ``stop`` of its places, of
    which the last is token ``end - 1`` of the row."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class RowShard:
    """What a rank has of one row. `keys`: int64 ``[tokens]``, where the row's tokens, up to the last that any
    of the queries sees, stand among the places that all ranks have gathered."""

    keys: Tensor
    queries: tuple[Queries, ...]


@dataclass(frozen=True)
class ContextShard:
    """A rank's places of some rows, as many as every other rank of `group` has.

    Attributes:
        tokens: int64 ``[places]``, padded; positions: int64 ``[places]``, of each token in its row.
        rows: those of which the rank has tokens.
        predicted_at: int64 ``[predicted]``: the places that predict response tokens.
        predicts: int64 ``[predicted]``: which of all response tokens these are, counted row by row.
        responses: how many response tokens there are.
        num_rows, routes, draws: of these places, as of `RowPlaces`.
    """

    tokens: Tensor
    positions: Tensor
    rows: tuple[RowShard, ...]
    predicted_at: Tensor
    predicts: Tensor
    responses: int
    group: ProcessGroup
    num_rows: Tensor
    routes: Tensor | None = None
    draws: Tensor | None = None

    @staticmethod
    def of(sequences: Sequences, group: ProcessGroup) -> ContextShard:
        """This rank's; every rank of `group` calls it with the same rows."""
        whole, rank, ranks = RowPlaces.of(sequences), group.rank(), group.size()
        starts = whole.lengths - whole.own.sum(1)
        spans = list(zip(starts.tolist(), whole.lengths.tolist()))
        dealt = [_places(whole, spans, index, ranks) for index in range(ranks)]
        width = max(1, *map(len, dealt))
        gathered_at = torch.zeros_like(whole.tokens)
        for index, places in enumerate(dealt):
            gathered_at[places] = torch.arange(len(places), device=places.device) + index * width
        rows = tuple(_row_shards(gathered_at[whole.places], spans, rank, ranks))
        at = gathered_at[whole.predicted_at]
        predicts = (at // width == rank).nonzero().squeeze(1)
        own = dealt[rank]
        routes, draws = (None if x is None else x[own.to(x.device)] for x in (whole.routes, whole.draws))
        return ContextShard(
            whole.tokens[own], whole.positions[own], rows, at[predicts] % width, predicts, len(at), group,
            whole.num_rows[own], routes, draws,
        )._filled(width - len(own))  # fmt: skip

    def padded(self, places: int) -> ContextShard:
        """With so many places on every rank: the ones more hold a token that belongs to no row."""
        width = len(self.tokens)
        more = places - width
        rows = tuple(replace(row, keys=row.keys + row.keys // width * more) for row in self.rows)
        return replace(self._filled(more), rows=rows)

    def _filled(self, more: int) -> ContextShard:
        """With so many places more on this rank."""
        tokens, positions, num_rows = (
            pad(values, (0, more)) for values in (self.tokens, self.positions, self.num_rows)
        )
        routes = padded_routes(self.routes, more)
        draws = None if self.draws is None else pad(self.draws, (0, more))
        return replace(
            self, tokens=tokens, positions=positions, num_rows=num_rows, routes=routes, draws=draws
        )

    def own(self, values: Tensor) -> Tensor:
        """Of values of all response tokens, ``[response tokens, …]``, those that this rank predicts."""
        return values[self.predicts]

    def whole(self, values: Tensor) -> Tensor:
        """Those of all response tokens, on every rank, from ``[predicted, …]`` of each. Collective.

        Each rank makes the same loss of them, and its gradient counts once: a rank's own values have that of
        its own loss.
        """
        return _GatheredResponses.apply(values, self.predicts, self.responses, self.group)


class _GatheredResponses(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, predicts: Tensor, responses: int, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(predicts)
        found = values.new_zeros(responses, *values.shape[1:])
        found[predicts] = values
        all_reduce(found, group=group)  # each value is added to zeros: nothing is rounded
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (predicts,) = ctx.saved_tensors
        return gradient[predicts], None, None, None


def _parts(span: tuple[int, int], rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The tokens of a row that are a rank's, of those from `span` start to stop."""
    for number in (rank, 2 * ranks - 1 - rank):
        start, stop = split(span, 2 * ranks, number)
        if start < stop:
            yield start, stop


def _places(whole: RowPlaces, spans: list[tuple[int, int]], rank: int, ranks: int) -> Tensor:
    """A rank's places, int64, row by row."""
    none = whole.tokens[:0]
    found = [
        whole.places[row, start:stop]
        for row, span in enumerate(spans)
        for start, stop in _parts(span, rank, ranks)
    ]
    return torch.cat([none, *found])


def _row_shards(keys: Tensor, spans: list[tuple[int, int]], rank: int, ranks: int) -> Iterator[RowShard]:
    """`keys`: int64 ``[rows, longest]``, where tokens stand among gathered places."""
    first = 0
    for row, span in enumerate(spans):
        queries: list[Queries] = []
        for start, stop in _parts(span, rank, ranks):
            queries.append(Queries(first, first + stop - start, stop))
            first += stop - start
        if queries:
            yield RowShard(keys[row, : queries[-1].end], tuple(queries))
