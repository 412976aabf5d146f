"""The order in which rows of a mixture, or of a curriculum, are drawn: a function of seed, step and stream.

**Mixtures.** After any number of drawn rows, each source has given as many as Webster's method (Sainte-Laguë)
gives seats to its weight. It is within one row of the exact share in practice, exact whenever the shares are
whole, and never takes a row back, so that the rows of a step are a difference of two such counts. Each source
passes over its own rows without replacement.

**Curricula.** The easiest share of the rows is what steps draw from, and it grows linearly to all of them
(competence-based curricula, Platanios et al. 2019, arXiv:1903.09848, with a linear competence); or each pass
goes from the easiest to the hardest row.

**By weight.** Where rows have weights (`success_rates`), each step draws from all rows of a group, without
regard to passes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from hflow.graph.row_sources import Curriculum
from hflow.runtime.permutation import permutation
from hflow.runtime.weighted_draw import draw

RowNumbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows to train on of one source.

    Attributes:
        name: of the source.
        weight: share of the drawn rows, relative to other groups'.
        rows: numbers of its rows, int64 ``[n]``, in file order.
        difficulty: float64 ``[n]``, of a curriculum.
    """

    name: str
    weight: Fraction
    rows: RowNumbers
    difficulty: NDArray[np.float64] | None = None

    @cached_property
    def by_ease(self) -> RowNumbers:
        """Places in `rows`, the easiest row first, equal ones in file order."""
        assert self.difficulty is not None
        return np.argsort(self.difficulty, kind="stable")


@dataclass(frozen=True)
class RowOrder:
    """`groups`: one, or the sources of a mixture; `curriculum`: of the rows within each group."""

    groups: tuple[RowGroup, ...]
    curriculum: Curriculum | None = None

    @property
    def first_steps(self) -> int:
        """How many steps draw from a part of the rows."""
        return (self.curriculum.steps or 0) if self.curriculum else 0

    def least_rows(self, size: int) -> tuple[int, ...]:
        """Rows that each group must have for batches of `size` rows."""
        total = sum(group.weight for group in self.groups)
        return tuple(math.ceil(size * group.weight / total) for group in self.groups)

    def counts(self, step: int, size: int) -> tuple[int, ...]:
        """How many rows of the batch of `step` are from each group."""
        before, after = self.drawn(step, size), self.drawn(step + 1, size)
        return tuple(b - a for a, b in zip(before, after))

    def batch(
        self, seed: int, step: int, size: int, shuffle: bool = True, stream: int = 0,
        weights: NDArray[np.float64] | None = None,
    ) -> list[int]:  # fmt: skip
        """The numbers of the `size` rows of `step`, those of all groups spread evenly over the batch.

        Args:
            weights: float64, of all rows by their numbers: how likely each is to be drawn.
        """
        drawn: list[tuple[float, int, int]] = []
        for place, count in enumerate(self.counts(step, size)):
            own = _Draw(self, place, seed, step, size, count, shuffle, stream)
            if weights is not None:
                rows = own.weighted(weights)
            else:
                rows = own.easy() if step < self.first_steps else own.passing()
            drawn += [((2 * i + 1) / count, place, int(row)) for i, row in enumerate(rows)]
        return [row for _, _, row in sorted(drawn, key=lambda d: d[:2])]

    def drawn(self, step: int, size: int) -> tuple[int, ...]:
        """Rows that each group has given before `step`."""
        return webster(tuple(group.weight for group in self.groups), step * size)


@dataclass(frozen=True)
class _Draw:
    """What one group gives to one batch: `count` rows."""

    order: RowOrder
    place: int
    seed: int
    step: int
    size: int
    count: int
    shuffle: bool
    stream: int

    @property
    def group(self) -> RowGroup:
        return self.order.groups[self.place]

    def easy(self) -> RowNumbers:
        """Rows out of the share that the curriculum has come to: distinct ones, and the same again where
        the group has fewer than the batch takes, which Webster's method may round up."""
        curriculum, rows = self.order.curriculum, self.group.rows
        assert curriculum and curriculum.steps
        share = curriculum.start + (1 - curriculum.start) * self.step / curriculum.steps
        pool = min(len(rows), max(self.count, math.ceil(len(rows) * share)))
        order = permutation(pool, self.seed, -1 - self.step, self.stream, self.place)
        chosen = np.resize(order, self.count)
        return rows[self.group.by_ease[chosen]]

    def weighted(self, weights: NDArray[np.float64]) -> RowNumbers:
        """Distinct rows, the more likely the greater their weights."""
        key = f"{self.seed}/weighted {self.step}/{self.stream}/source {self.place}"
        return self.group.rows[draw(weights[self.group.rows], self.count, key)]

    def passing(self) -> RowNumbers:
        """The next rows of the passes over the group, which began after the curriculum's first steps."""
        if len(self.order.groups) == 1:  # a pass ends with its last whole batch
            number, at = divmod(self.step - self.order.first_steps, len(self.group.rows) // self.size)
            return self._pass(number)[at * self.size : (at + 1) * self.size]
        first, rows, found = self._given(self.step), len(self.group.rows), np.empty(0, np.int64)
        while len(found) < self.count:
            number, at = divmod(first + len(found), rows)
            found = np.append(found, self._renewed(number)[at : at + self.count - len(found)])
        return found

    def _renewed(self, number: int) -> RowNumbers:
        """A pass, begun with rows that are not in the batch in which the pass before ends: where the group
        has twice as many rows as a batch takes of it, no row comes twice in a batch."""
        order, start = self._pass(number), number * len(self.group.rows)
        step = (
            bisect_right(range(self.step + 1), start, key=self._given) - 1
        )  # the batch that has its first row
        old, new = start - self._given(step), self._given(step + 1) - start
        if number == 0 or old == 0:
            return order
        ending = self._pass(number - 1)[-old:]
        fresh = np.flatnonzero(~np.isin(order, ending))[:new]
        return np.concatenate([order[fresh], np.delete(order, fresh)])

    def _given(self, step: int) -> int:
        """Rows that the group has given to the passes before `step`."""
        begin = min(self.order.first_steps, step)
        return self.order.drawn(step, self.size)[self.place] - self.order.drawn(begin, self.size)[self.place]

    def _pass(self, number: int) -> RowNumbers:
        is_sorted = self.order.curriculum is not None and not self.order.curriculum.steps
        return _pass(self.group, is_sorted, self.seed, number, self.shuffle, self.stream, self.place)


@lru_cache(maxsize=32)
def _pass(
    group: RowGroup, is_sorted: bool, seed: int, number: int, shuffle: bool, stream: int, place: int
) -> RowNumbers:
    """All rows of a group; with `is_sorted` from easy to hard, and `shuffle` then orders equal ones."""
    rows = len(group.rows)
    order = permutation(rows, seed, number, stream, place) if shuffle else np.arange(rows)
    if is_sorted:
        assert group.difficulty is not None
        order = order[np.argsort(group.difficulty[order], kind="stable")]
    return group.rows[order]


@lru_cache(maxsize=256)
def webster(weights: tuple[Fraction, ...], total: int) -> tuple[int, ...]:
    """`total` rows shared out by Webster's method: one after the other goes to the source with the greatest
    ``weight / (2 rows + 1)``, of equal ones to the first."""
    whole = sum(weights)
    counts = [math.floor(total * weight / whole + Fraction(1, 2)) for weight in weights]
    while sum(counts) < total:
        gains = [weight / (2 * count + 1) for weight, count in zip(weights, counts)]
        counts[gains.index(max(gains))] += 1
    while sum(counts) > total:
        losses = [weight / (2 * count - 1) if count else math.inf for weight, count in zip(weights, counts)]
        counts[len(losses) - 1 - losses[::-1].index(min(losses))] -= 1
    return tuple(counts)


def groups_of(
    names: Sequence[str], weights: Sequence[float], sources: Sequence[int], difficulty: Sequence[float] | None
) -> tuple[RowGroup, ...]:
    """Rows by their source. A weight is the decimal number as it is written: 0.1 is a tenth.

    Args:
        sources: of each row, the place of its source in `names`.
        difficulty: of each row.
    """
    of = np.asarray(sources, np.int64)
    hard = None if difficulty is None else np.asarray(difficulty, np.float64)
    found: list[RowGroup] = []
    for place, (name, weight) in enumerate(zip(names, weights)):
        rows = np.flatnonzero(of == place)
        found.append(RowGroup(name, Fraction(str(weight)), rows, None if hard is None else hard[rows]))
    return tuple(found)
