"""A part of a choice: the assignments of some node groups, and what their readers copy and move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.weight_syncs import WeightCopy
from hflow.cost.residency import OwnCopy


@dataclass(frozen=True)
class PartialAssignment:
    """The assignments chosen so far. `copies`: a reader's own copy, by node group; `moves`: seconds that
    weights need to reach a reader, by node."""

    assignments: Mapping[str, Assignment] = field(default_factory=dict[str, Assignment])
    copies: Mapping[str, OwnCopy] = field(default_factory=dict[str, OwnCopy])
    moves: Mapping[str, float] = field(default_factory=dict[str, float])
    renewed: frozenset[WeightCopy] = frozenset()

    def joined(self, other: PartialAssignment) -> PartialAssignment:
        """Both; they are about node groups of different models."""
        return PartialAssignment(
            {**self.assignments, **other.assignments},
            {**self.copies, **other.copies},
            {**self.moves, **other.moves},
            self.renewed | other.renewed,
        )
