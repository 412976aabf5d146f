"""Few cases in which every value of a factor meets every value of every other one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(case: Case) -> frozenset[Pair]:
    return frozenset(combinations(case.items(), 2))


def covering(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Allowed cases that hold every pair of values which some allowed case holds.

    Greedy: the next case is one with the most pairs that are missing. What a case adds only shrinks, so an
    old count is an upper bound, and a case whose count is fresh and the greatest is the one. Ties are broken
    by lot (always the same), so that no value is in most cases only because it is named first.
    """
    cases = [case for values in product(*factors.values()) if allowed(case := dict(zip(factors, values)))]
    Random(1).shuffle(cases)
    missing = set[Pair]().union(*map(pairs, cases))
    heap = [(-len(pairs(case)), number) for number, case in enumerate(cases)]
    heapify(heap)
    chosen: list[Case] = []
    while missing:
        count, number = heap[0]
        added = len(pairs(cases[number]) & missing)
        if added < -count:
            heapreplace(heap, (-added, number))
            continue
        heappop(heap)
        chosen.append(cases[number])
        missing -= pairs(cases[number])
    return chosen
