"""A search, and a wider one where bounds cannot tell that nothing better was left out.

Most graphs are best with each model in one place, and for most of them that is told in milliseconds
(`bounds/unsearched`). Only where it cannot be are the node groups that may be better elsewhere searched in
places of their own. In a plan that is better, all others are on all devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.planner.bounds.unsearched import unsearched
from hflow.compiler.planner.effort import EFFORT
from hflow.compiler.planner.full_assignment import FullAssignment
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.search import BestFirstSearch, SearchResult
from hflow.compiler.planner.search_space import SearchSpace

MOST_APART = 7  # node groups: 4,139 ways to share devices,
MOST_BESIDE = 5  # and 1,081 ways beside pinned ones, for each place where sets may begin
LEAST = EFFORT // 5  # that the wider search may take whatever the first one has,
FITTING = EFFORT // 2  # or where nothing fits with each model in one place
SOON = EFFORT // 4  # after which the first one ends if all of its plans are in the wider space
FOREVER = float("inf")
Searcher = Callable[[SearchSpace, FullAssignment | None], SearchResult]


def search_wider(space: SearchSpace, budget_s: float | None, most: int = EFFORT) -> SearchResult:
    """The best choice, with the proof as far as the budget goes.

    Args:
        budget_s: seconds for both searches; None for an effort of `most`, and more where nothing was found.
    """
    if budget_s is not None:
        return _within(space, time.monotonic() + budget_s)
    first, begun, spent = BestFirstSearch(space), False, 0

    def run(space: SearchSpace, known: FullAssignment | None) -> SearchResult:
        nonlocal begun, spent
        if space.apart:
            wider, left = BestFirstSearch(space, known=known), max(most - spent, LEAST)
            found = wider.go_on(left if known else FITTING, until_found=False)
            return wider.go_on(left) if found.choice else found
        if begun:
            return first.go_on(most)
        begun, found = True, first.go_on(min(SOON, most), until_found=False)
        if found.gap and not _all_apart(space, _apart(space, found)[0]):
            found = first.go_on(most)
        spent = found.effort
        return found

    return widening(space, run)


def _within(space: SearchSpace, deadline: float) -> SearchResult:
    """Of `time.monotonic()`, which is passed only until something fits."""

    def run(space: SearchSpace, known: FullAssignment | None) -> SearchResult:
        return BestFirstSearch(space, deadline, known=known).go_on(FOREVER, until_found=not space.apart)

    return widening(space, run)


def widening(space: SearchSpace, searcher: Searcher) -> SearchResult:
    """What `searcher` finds in `space` and, where that may miss the best plan, in the wider one.

    Args:
        searcher: of a space, and with a choice that is known from before. Asked again, it goes on until it
            finds something in `space`, or knows that there is nothing.
    """
    found = searcher(space, None)
    apart, rest = _apart(space, found)
    if not apart or space.draft.options.placement != "auto":
        again = searcher(space, None) if _open(space, found) else found
        return replace(again, unsearched=(*apart, *rest))
    more = searcher(_wider(space, apart), found.choice)
    if _open(space, found) and not more.choice:
        found = searcher(space, None)
        more = searcher(_wider(space, apart), found.choice) if found.choice else more
    explored = found.explored + more.explored
    proven_s = more.bound_s if _all_apart(space, apart) else min(found.bound_s, more.bound_s)
    if not more.choice:
        return replace(more, bound_s=proven_s, explored=explored, unsearched=rest)
    step_s = more.choice.step_s
    gap = 1 - proven_s / step_s if proven_s < step_s * (1 - RESOLUTION) else 0.0
    return SearchResult(more.choice, proven_s, explored, gap, unsearched=rest)


def _open(space: SearchSpace, found: SearchResult) -> bool:
    """Whether nothing was found that fits and is of use, but something may be."""
    return found.choice is None and found.bound_s < space.draft.below_s


def _apart(space: SearchSpace, found: SearchResult) -> tuple[tuple[NodeGroup, ...], tuple[NodeGroup, ...]]:
    """The node groups that may be better in places of their own: those that the wider space has there, and
    others."""
    limit_s = found.choice.step_s * (1 - RESOLUTION) if found.choice else space.draft.below_s
    left = unsearched(space, limit_s)
    most = MOST_BESIDE if space.pinned else MOST_APART
    return left[:most], left[most:]


def _all_apart(space: SearchSpace, apart: Collection[NodeGroup]) -> bool:
    """Whether all of the space's plans are in the wider one too."""
    return {group.name for group in apart} | space.pinned.keys() == {group.name for group in space.groups}


def _wider(space: SearchSpace, apart: Sequence[NodeGroup]) -> SearchSpace:
    """Node groups that are apart run on any number of devices on which a pin may put them."""
    candidates = {group.name: _by_count(space.all_candidates(group.name)) for group in apart}
    draft = replace(space.draft, candidates={**space.draft.candidates, **candidates})
    return SearchSpace(draft, frozenset(candidates), space)


def _by_count(candidates: Iterable[Candidate]) -> Candidates:
    found: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.num_devices, []).append(candidate)
    return {count: tuple(each) for count, each in sorted(found.items())}
