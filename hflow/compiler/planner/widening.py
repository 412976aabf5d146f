"""A search, and a wider one where bounds cannot tell that nothing better was left out.

Most graphs are best with each model in one place, and for most of them that is told in milliseconds
(`bounds/unsearched`). Only where it cannot be are the node groups that may be better elsewhere searched in
places of their own. In a plan that is better, all others are on all devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hflow.compiler.candidates.node_groups import Candidate, Candidates, NodeGroup
from hflow.compiler.planner.bounds.unsearched import unsearched
from hflow.compiler.planner.effort import EFFORT
from hflow.compiler.planner.full_assignment import FullAssignment
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.search import SearchResult, search
from hflow.compiler.planner.search_space import SearchSpace

MOST_APART = 7  # node groups: 4,139 ways to share devices,
MOST_BESIDE = 5  # and 1,081 ways beside pinned ones, for each place where sets may begin
LEAST = EFFORT // 5  # that the wider search may take whatever the first one has,
FITTING = EFFORT // 10  # or where nothing fits with each model in one place
Searcher = Callable[[SearchSpace, FullAssignment | None], SearchResult]


def search_wider(space: SearchSpace, budget_s: float | None) -> SearchResult:
    """The best choice, with the proof as far as the budget goes.

    Args:
        budget_s: seconds for both searches; None for the default effort.
    """
    until, spent = None if budget_s is None else time.monotonic() + budget_s, 0

    def run(space: SearchSpace, known: FullAssignment | None) -> SearchResult:
        nonlocal spent
        left_s = None if until is None else until - time.monotonic()
        most = max(EFFORT - spent, LEAST) if known or not space.apart else FITTING
        found = search(space, left_s, known=known, most=most, until_found=not space.apart)
        spent += found.effort
        return found

    return widening(space, run)


def widening(space: SearchSpace, searcher: Searcher) -> SearchResult:
    """What `searcher` finds in `space` and, where that may miss the best plan, in the wider one.

    Args:
        searcher: of a space, and with a choice that is known from before.
    """
    found = searcher(space, None)
    limit_s = found.choice.step_s * (1 - RESOLUTION) if found.choice else float("inf")
    left = unsearched(space, limit_s)
    most = MOST_BESIDE if space.pinned else MOST_APART
    apart = left[:most]
    if not apart or space.draft.options.placement != "auto":
        return replace(found, unsearched=left)
    more = searcher(_wider(space, apart), found.choice)
    explored = found.explored + more.explored
    if not (found.choice and more.choice):
        return replace(more, explored=explored, unsearched=left[most:])
    bound_s, step_s = min(found.bound_s, more.bound_s), more.choice.step_s
    gap = 1 - bound_s / step_s if bound_s < step_s * (1 - RESOLUTION) else 0.0
    return SearchResult(more.choice, bound_s, explored, gap, unsearched=left[most:])


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
