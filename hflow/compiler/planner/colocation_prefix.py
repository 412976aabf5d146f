"""Colocations whose first sets are the same.

Most allocations are cut when one or two sets have their devices. That is found out once for all colocations
with these sets, whichever of the other parts share devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hflow.compiler.planner.placements import Colocation, Members, Partition


@dataclass(frozen=True)
class ColocationPrefix:
    """Those of `every` colocation that have `numbers`, one at least: their first `length` sets are the same,
    and so is what runs on all devices."""

    every: Sequence[Colocation]
    numbers: tuple[int, ...]
    length: int

    @staticmethod
    def shortest(every: Sequence[Colocation]) -> list[ColocationPrefix]:
        """Those of no sets, of all colocations."""
        alike = defaultdict[object, list[int]](list)
        for number, colocation in enumerate(every):
            alike[colocation.spread, colocation.first].append(number)
        return [ColocationPrefix(every, tuple(numbers), 0) for numbers in alike.values()]

    @cached_property
    def longer(self) -> list[tuple[Members, ColocationPrefix]]:
        """Each set that may come next, and the colocations with it."""
        alike = defaultdict[Members, list[int]](list)
        for number in self.numbers:
            alike[self.every[number].partition[self.length]].append(number)
        length = self.length + 1
        return [(members, ColocationPrefix(self.every, tuple(own), length)) for members, own in alike.items()]

    @property
    def whole(self) -> bool:
        """Whether it has all sets."""
        return not self.rest

    @property
    def ungrouped(self) -> bool:
        """Whether it is not known which of the parts in no set of it share devices."""
        return len(self.numbers) > 1

    @cached_property
    def rest(self) -> Partition:
        """The other sets; each part by itself where they are `ungrouped`."""
        others = self.every[self.numbers[0]].partition[self.length :]
        return tuple((part,) for members in others for part in members) if self.ungrouped else others

    @cached_property
    def colocation(self) -> Colocation:
        """Its sets, and the rest."""
        partition, spread, first = self.every[self.numbers[0]]
        return Colocation((*partition[: self.length], *self.rest), spread, first)
