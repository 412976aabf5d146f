"""A part of a choice: the seats of some units, and what their readers copy and move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hflow.compiler.planner.renewals import Copy
from hflow.compiler.planner.seats import Seat


@dataclass(frozen=True)
class Chosen:
    """The seats chosen so far. `copies`: bytes of a reader's own copy; `moves`: seconds that weights need to
    reach a reader, by node."""

    seats: Mapping[str, Seat] = field(default_factory=dict[str, Seat])
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    moves: Mapping[str, float] = field(default_factory=dict[str, float])
    renewed: frozenset[Copy] = frozenset()

    def joined(self, other: Chosen) -> Chosen:
        """Both; they are about units of different models."""
        return Chosen(
            {**self.seats, **other.seats},
            {**self.copies, **other.copies},
            {**self.moves, **other.moves},
            self.renewed | other.renewed,
        )
