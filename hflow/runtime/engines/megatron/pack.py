"""Rows as one sequence of tokens without padding, in which rows of one prompt share its tokens.

A token's hidden states depend on what comes before it. So the prompt of a group of samples is the same for
all of them, in every layer: it is computed once, and its gradient is the sum over the samples. Only attention
knows of rows: it sees each of them whole, prompt and response, or, on CPUs, prompts once as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from hflow.plan.packing import blocks
from hflow.runtime.engines.megatron.gather import Gather
from hflow.runtime.engines.megatron.prompt_groups import PromptGroups
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.routes import NONE


@dataclass(frozen=True)
class RowPlaces:
    """The inputs of some rows, each once: every different prompt, then every response but its last token.

    Attributes:
        tokens: int64 ``[places]``, at least one, which is padding when the rows have none; positions: int64
            ``[places]``, of each token in its row.
        places: int64 ``[rows, longest]``: where each row's tokens stand, in order; 0 where a row is shorter.
        own: bool ``[rows, longest]``: which of these are no other row's, or the first row's that has them.
        lengths: int64 ``[rows]``, of the inputs.
        predicted_at: int64 ``[response tokens]``: the places that predict them, row by row.
        num_rows: int64 ``[places]``: how many rows have the token; 0 of padding.
        routes: on the host, int16 ``[places, choices]``: the experts that each token passes through, negative
            where there is no token; None: routers choose.
        draws: int64 ``[places]``: the number of each token by which dropout draws; None: nothing is dropped.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    own: Tensor
    lengths: Tensor
    predicted_at: Tensor
    num_rows: Tensor
    routes: Tensor | None
    draws: Tensor | None

    @staticmethod
    def of(sequences: Sequences) -> RowPlaces:
        """Those of whole rows."""
        prompts, responses = sequences.prompt_lengths, (sequences.response_lengths - 1).clamp(min=0)
        first, lengths = sequences.same_prompt, prompts + responses
        leads = first == torch.arange(len(first), device=first.device)
        shared = prompts * leads
        # Places before those of a row's prompt and of its response, less where in the row these begin.
        prompt_at = (shared.cumsum(0) - shared)[first]
        response_at = shared.sum() + responses.cumsum(0) - responses - prompts
        longest = int(lengths.max()) if len(lengths) else 0
        position = torch.arange(longest, device=first.device).expand(len(first), -1)
        in_prompt, present = position < prompts[:, None], position < lengths[:, None]
        places = position + torch.where(in_prompt, prompt_at[:, None], response_at[:, None])
        own = present & (leads[:, None] | ~in_prompt)
        count = max(1, int((shared + responses).sum()))
        tokens, positions = first.new_zeros(count), first.new_zeros(count)
        tokens[places[own]] = sequences.tokens[:, :longest][own]
        positions[places[own]] = position[own]
        found = places.where(present, 0)
        draws = None
        if sequences.draws is not None:
            draws = first.new_zeros(count)
            draws[places[own]] = sequences.draws[:, :longest][own]
        num_rows, routes = (
            torch.bincount(places[present], minlength=count),
            _routes(sequences, found, own, count),
        )
        at = places[sequences.predicted_at]
        return RowPlaces(tokens, positions, found, own, lengths, at, num_rows, routes, draws)


@dataclass(frozen=True)
class Pack:
    """Rows whole, as one rank runs them.

    Attributes:
        sequences: the rows, and `rows`: where they are, without padding after them.
        tokens, positions, num_rows, routes, draws: as of `RowPlaces`.
    """

    sequences: Sequences
    rows: RowPlaces
    tokens: Tensor
    positions: Tensor
    num_rows: Tensor
    routes: Tensor | None = None
    draws: Tensor | None = None

    @staticmethod
    def of(sequences: Sequences) -> Pack:
        """At least one token, which is padding when the rows have none."""
        rows = RowPlaces.of(sequences)
        return Pack(sequences, rows, rows.tokens, rows.positions, rows.num_rows, rows.routes, rows.draws)

    @property
    def predicted_at(self) -> Tensor:
        """int64 ``[response tokens]``: the places that predict them, row by row."""
        return self.rows.predicted_at

    @cached_property
    def groups(self) -> PromptGroups:
        """The rows by their prompts."""
        return PromptGroups.of(self.sequences)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(rows, longest) of rows of about the same length."""
        return self._blocks[0]

    @cached_property
    def gather(self) -> Gather:
        """Where each token stands in all blocks, read one after the other. Where a row is shorter than its
        block there is any token, which by causality none of the row sees."""
        return self._blocks[1].padded(len(self.tokens))

    @cached_property
    def _blocks(self) -> tuple[tuple[tuple[int, int], ...], Gather]:
        return _blocks(self.rows)

    def own(self, values: Tensor) -> Tensor:
        """Of values of all response tokens those that this rank predicts: all."""
        return values

    def whole(self, values: Tensor) -> Tensor:
        """Those of all response tokens from those that this rank predicts."""
        return values

    def padded(self, places: int) -> Pack:
        """With so many places: the ones more hold a token that belongs to no row."""
        more = places - len(self.tokens)
        tokens, positions, num_rows = (
            pad(values, (0, more)) for values in (self.tokens, self.positions, self.num_rows)
        )
        routes = padded_routes(self.routes, more)
        draws = None if self.draws is None else pad(self.draws, (0, more))
        return Pack(self.sequences, self.rows, tokens, positions, num_rows, routes, draws)


def padded_routes(routes: Tensor | None, more: int) -> Tensor | None:
    """Those of so many places more, of which routers choose."""
    return None if routes is None else pad(routes, (0, 0, 0, more), value=NONE)


def _routes(sequences: Sequences, places: Tensor, own: Tensor, count: int) -> Tensor | None:
    """Those of each of `count` places."""
    if sequences.routes is None:
        return None
    own = own.cpu()
    found = torch.full((count, sequences.choices), NONE, dtype=torch.int16)
    given = sequences.routes.padded(NONE).unflatten(1, (-1, sequences.choices))
    found[places.cpu()[own]] = given[:, : own.shape[1]][own]
    return found


def _blocks(rows: RowPlaces) -> tuple[tuple[tuple[int, int], ...], Gather]:
    """Shapes of the blocks into which rows are cut, and where tokens are in these."""
    at, own, present = list[Tensor](), list[Tensor](), list[Tensor]()
    lengths, order = rows.lengths.sort(descending=True, stable=True)
    order, lengths = order[lengths > 0], lengths[lengths > 0]
    shapes = tuple((count, int(longest)) for count, longest in blocks(lengths.tolist()))
    for some, (_, width) in zip(order.split([count for count, _ in shapes]), shapes):
        at.append(rows.places[some, :width].flatten())
        own.append(rows.own[some, :width].flatten())
        inside = torch.arange(width, device=rows.lengths.device) < rows.lengths[some, None]
        present.append(inside.flatten())
    count, nothing = len(rows.tokens), rows.places.new_zeros(0)
    if not shapes:
        one = rows.places.new_zeros(1)
        return ((1, 1),), Gather(one, one.expand(count), 0, nothing, nothing)
    places, mine = torch.cat(at), torch.cat(own)
    found_at, (further,) = places.new_zeros(count), (torch.cat(present) & ~mine).nonzero(as_tuple=True)
    found_at[places[mine]] = mine.nonzero(as_tuple=True)[0]
    return shapes, Gather(places, found_at, count, further, places[further])
