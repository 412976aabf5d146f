"""Branch and bound over a `SearchSpace`: the plan with the shortest step, and the proof that none of it is
shorter.

Allocations (a partition of the models, and the number of devices of each set) are taken in the order of a
lower bound of theirs (`frontier`). Within one, `branch` chooses assignments node group by node group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import prod

from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.planner.assignments import Assignment
from hflow.compiler.planner.bounds.bounds import Bounds
from hflow.compiler.planner.bounds.memory_stairs import NEVER
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.effort import EFFORT
from hflow.compiler.planner.frontier import Frontier
from hflow.compiler.planner.full_assignment import FullAssignment
from hflow.compiler.planner.incumbent import RESOLUTION, Incumbent
from hflow.compiler.planner.placements import Allocation, Colocation, allocations
from hflow.compiler.planner.search_space import SearchSpace

DIVES = 10  # allocations into which it looks before it tries all choices of one
TOLD_EVERY = 100  # choices, of about a millisecond each


@dataclass(frozen=True)
class SearchResult:
    """`choice`: the best, if any fits; `bound_s`: none takes less, and none fits where it is infinite;
    `explored`: choices that were priced. `gap`: by what part the best may be too long; 0 where that is less
    than what makes steps count as different. `effort`: what it took, by `effort.py`. `unsearched`: node
    groups that may be better in places that were not searched."""

    choice: FullAssignment | None
    bound_s: float
    explored: int
    gap: float = 0.0
    effort: int = 0
    unsearched: tuple[NodeGroup, ...] = ()


class BestFirstSearch:
    """One that can be gone on with."""

    def __init__(
        self,
        space: SearchSpace,
        deadline: float = float("inf"),
        resolution: float = RESOLUTION,
        known: FullAssignment | None = None,
    ):
        """Args:
        deadline: of `time.monotonic()`.
        resolution: steps whose times differ by a smaller part count as equally long.
        known: a choice that was found before, and is kept where none is better.
        """
        self.best = Incumbent(space, deadline, resolution, known)
        self.known, self.bounds = known, Bounds(space.draft)

    def go_on(self, most: float, until_found: bool = True) -> SearchResult:
        """The best choice, proven to be so unless an effort of `most` in all, or the deadline, ends it
        before.

        Args:
            until_found: whether it goes on beyond them until something fits.
        """
        best = self.best
        best.most, best.until_found = most, until_found
        proven_s = _proven_s(self._frontier)
        if best.choice is None or proven_s >= best.limit_s:
            bound_s = best.limit_s if best.choice else proven_s
            return SearchResult(best.choice, bound_s, best.explored, effort=best.effort)
        gap = 1 - proven_s / best.choice.step_s
        return SearchResult(best.choice, proven_s, best.explored, gap, best.effort)

    @cached_property
    def _frontier(self) -> Frontier:
        """After a plan to begin with."""
        space = self.best.space
        for colocation in () if self.known else _together(space):
            sizes = map(space.sizes, colocation.partition)
            Branch(
                Allocation(colocation.partition, tuple(each[-1] for each in sizes)), self.best, self.bounds
            ).dive()
        return Frontier(self.best, self.bounds)


def search(
    space: SearchSpace,
    budget_s: float | None,
    resolution: float = RESOLUTION,
    known: FullAssignment | None = None,
    most: int = EFFORT,
) -> SearchResult:
    """The best choice, proven to be so unless the budget is spent before.

    Args:
        budget_s: seconds; None for an effort of `most` instead.
        resolution, known: of a `BestFirstSearch`.
    """
    if budget_s is None:
        return BestFirstSearch(space, resolution=resolution, known=known).go_on(most)
    return BestFirstSearch(space, time.monotonic() + budget_s, resolution, known).go_on(NEVER)


def _together(space: SearchSpace) -> Iterator[Colocation]:
    """All parts on the same devices."""
    return (each for each in space.colocations() if len(each.partition) == 1 and not each.spread)


def _proven_s(frontier: Frontier) -> float:
    """Try all that may be better than the best choice; what the budget leaves untried takes no less."""
    best = frontier.best
    first = [taken for _ in range(DIVES) if (taken := frontier.take())]
    for _, branch in first:  # what they lead to lets more of each be cut
        branch.dive()
    for partial, branch in chain(first, iter(frontier.take, None)):
        if partial.bound_s < best.limit_s:
            frontier.put(partial, branch.raised_s())
    return frontier.bound_s


def exhaustive(space: SearchSpace, known: FullAssignment | None = None) -> SearchResult:
    """Price every choice of the space: slow, but without bounds that could be wrong."""
    best, on_priced = Incumbent(space, choice=known), space.draft.options.on_priced
    total = num_choices(space) if on_priced else 0
    for number, chosen in enumerate(_choices(space)):
        if on_priced and number % TOLD_EVERY == 0:
            on_priced(number, total)
        best.offer(chosen)
    if on_priced:
        on_priced(total, total)
    return SearchResult(best.choice, best.choice.step_s if best.choice else NEVER, best.explored)


def num_choices(space: SearchSpace) -> int:
    """How many `exhaustive` prices, those that do not fit included."""
    return sum(prod(map(len, assignments.values())) for assignments in _assignments(space))


def _choices(space: SearchSpace) -> Iterator[dict[str, Assignment]]:
    for assignments in _assignments(space):
        yield from (dict(zip(assignments, chosen)) for chosen in product(*assignments.values()))


def _assignments(space: SearchSpace) -> Iterator[dict[str, tuple[Assignment, ...]]]:
    """Of every node group, in every allocation."""
    for colocation in space.colocations():
        yield from map(space.assignments, _allocations(colocation, space))


def _allocations(colocation: Colocation, space: SearchSpace) -> Iterator[Allocation]:
    partition, spread, first = colocation
    for each in allocations(partition, list(map(space.sizes, partition)), space.shared_out(colocation)):
        yield replace(each, spread=spread, first=first)
