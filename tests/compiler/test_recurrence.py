"""What a recurrence cycle leaves out (sets of nodes within larger ones, whole recurrence cycles) says nothing
more: against all of it, term by term as the bounds are defined."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hflow.compiler.planner.bounds.descendants import Before, Descendants
from hflow.compiler.planner.bounds.numbers import ARRAYS, FLOATS
from hflow.compiler.planner.bounds.recurrence import RecurrenceCycle
from hflow.compiler.planner.bounds.windows import Window

FIRST = "n0"


@dataclass(frozen=True)
class Case:
    """`edges`: the least time between two nodes. `whole`: nodes that run once."""

    names: tuple[str, ...]
    edges: dict[tuple[str, str], float]
    places: dict[str, tuple[int, ...]]
    whole: frozenset[str]
    closing: tuple[str, ...]
    times: dict[str, float]

    @property
    def work(self) -> dict[str, float]:
        return {n: seconds * (1 if n in self.whole else 3) for n, seconds in self.times.items()}

    @property
    def nodes(self) -> list[tuple[str, Before]]:
        return [(n, tuple((a, gap) for (a, b), gap in self.edges.items() if b == n)) for n in self.names]

    @property
    def descendants(self) -> Descendants:
        return Descendants(FIRST, tuple(self.nodes))

    @property
    def cycle(self) -> RecurrenceCycle:
        return RecurrenceCycle.of(self.descendants, self.closing, {}, self.places, self.whole)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every node follows from the first one. Whole numbers, so that many paths are equally long."""
    names = tuple(f"n{i}" for i in range(draw(st.integers(2, 7))))
    edges: dict[tuple[str, str], float] = {}
    for number, name in enumerate(names[1:], 1):
        before = draw(st.sets(st.sampled_from(names[:number]), min_size=1))
        edges |= {(b, name): float(draw(st.integers(0, 2))) for b in sorted(before)}
    places = {n: tuple(sorted(draw(st.sets(st.integers(0, 2), min_size=1, max_size=2)))) for n in names}
    closing = tuple(n for n in names if set(places[n]) & set(places[FIRST]))
    whole = frozenset(draw(st.sets(st.sampled_from(names))))
    return Case(names, edges, places, whole, closing, {n: float(draw(st.integers(0, 9))) for n in names})


@pytest.mark.slow
@given(cases())
@settings(max_examples=400, deadline=None)
def test_a_ring_takes_what_all_its_terms_say(case: Case) -> None:
    least_s = case.cycle.least_s(FLOATS, case.times, case.work)
    assert least_s == pytest.approx(_least_s(case))
    each = {n: np.array([seconds, 2 * seconds]) for n, seconds in case.times.items()}
    work = {n: np.array([seconds, 2 * seconds]) for n, seconds in case.work.items()}
    assert case.cycle.least_s(ARRAYS, each, work)[0] == pytest.approx(least_s)


@pytest.mark.slow
@given(cases())
@settings(max_examples=400, deadline=None)
def test_a_ring_on_one_set_of_devices_takes_no_more_than_the_set(case: Case) -> None:
    """But for the calls in between, which are less than all of them."""
    cycle, work = case.cycle, case.work
    busy_s = max(sum(work[n] for n in case.names if one in case.places[n]) for one in range(3))
    assume(cycle.alone)
    assert cycle.least_s(FLOATS, case.times, work) <= busy_s + sum(case.edges.values()) + 1e-9


@given(cases())
@settings(max_examples=200, deadline=None)
def test_a_window_waits_for_what_each_set_of_devices_does(case: Case) -> None:
    """All that comes before a node on any one of them, not only what paths tell."""
    window = Window.of(case.descendants, case.places)
    heads = window.heads({n: np.array([seconds, 2 * seconds]) for n, seconds in case.times.items()})
    expected, before = {FIRST: 0.0}, _before(case)
    for name in case.names[1:]:
        ends = [expected[a] + case.times[a] + gap for (a, b), gap in case.edges.items() if b == name]
        expected[name] = max(ends + _parts_s(before[name], case, expected))
    assert {name: float(seconds[0]) for name, seconds in heads.items()} == pytest.approx(expected)


def _least_s(case: Case) -> float:
    """By the definitions: all predecessors, and of nodes that run one at a time all that are around."""
    times, work, before = case.times, case.work, _before(case)
    heads = {FIRST: 0.0}
    for name in case.names[1:]:
        heads[name] = max(heads[a] + times[a] + gap for (a, b), gap in case.edges.items() if b == name)
    inside = [n for n in case.names if any(n == c or n in before[c] for c in case.closing)]
    tails = dict.fromkeys(case.closing, 0.0)
    for name in reversed(inside):
        paths = [tails[b] + times[b] + gap for (a, b), gap in case.edges.items() if a == name and b in inside]
        tails[name] = max([tails.get(name, 0.0), *paths])
    ends = [heads[n] + times[n] for n in case.closing]
    if len(case.closing) < 2:
        return max(ends)
    subsets = (part for size in range(1, len(inside) + 1) for part in combinations(inside, size))
    machines = (
        min(heads[n] for n in part) + sum(work[n] for n in part) + min(tails[n] for n in part)
        for part in subsets
        if all(_one_at_a_time(case, before, *pair) for pair in combinations(part, 2))
    )
    return max([*ends, *machines])


def _one_at_a_time(case: Case, before: dict[str, list[str]], one: str, other: str) -> bool:
    """Whether two nodes share devices, or the one waits for all of the other."""
    waits = one in before[other] or other in before[one]
    return bool({*case.places[one]} & {*case.places[other]}) or (waits and {one, other} <= case.whole)


def _parts_s(names: list[str], case: Case, known: dict[str, float]) -> list[float]:
    """When each set of devices can be done with its part of `names`."""
    parts = [[n for n in names if one in case.places[n]] for one in range(3)]
    return [min(known[n] for n in part) + sum(case.times[n] for n in part) for part in parts if part]


def _before(case: Case) -> dict[str, list[str]]:
    """All that each node follows from."""
    found: dict[str, list[str]] = {}
    for name in case.names:
        direct = {a for a, b in case.edges if b == name}
        found[name] = [n for n in case.names if n in direct or any(n in found[d] for d in direct)]
    return found
