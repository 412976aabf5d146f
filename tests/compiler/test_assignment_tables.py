"""What a table leaves out, some part that it keeps replaces in any room."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.compiler.planner.bounds.assignment_tables import (
    NEVER,
    AssignmentTable,
    MemoryInterval,
    undominated,
)
from hflow.compiler.planner.bounds.knapsack import within_limit
from hflow.compiler.planner.bounds.numbers import Bools
from hflow.compiler.planner.partial_assignment import PartialAssignment

NODES, SETS, STEPS, MOST = 2, 2, 3, 12
RUNS = np.array([[1.0, 0.0], [1.0, 1.0]])  # the first node on one set of devices, the second on both


@st.composite
def tables(draw: st.DrawFn) -> AssignmentTable:
    """Whole numbers, so that many parts are equal in some respect."""
    count = draw(st.integers(1, 12))
    idle = [[draw(st.integers(0, 4)) for _ in range(SETS)] for _ in range(count)]
    starts = np.full((STEPS, count, NODES), NEVER, dtype=np.int64)
    seconds = np.zeros(starts.shape)
    for row in range(count):
        for node in range(NODES):
            steps = draw(st.integers(1, STEPS))
            needs = sorted(draw(st.sets(st.integers(0, MOST - 1), min_size=steps, max_size=steps)))
            times = sorted(draw(st.sets(st.integers(1, 9), min_size=steps, max_size=steps)), reverse=True)
            starts[:steps, row, node], seconds[:steps, row, node] = needs, times
    moves = [[draw(st.sampled_from([np.nan, 1.0, 2.0]))] for _ in range(count)]
    parts = [PartialAssignment() for _ in range(count)]
    return AssignmentTable(
        parts, ("a", "b"), ("a",), np.array(idle), starts, seconds, np.array(moves), RUNS, np.ones((1, SETS))
    )


@pytest.mark.slow
@given(tables(), st.data())
@settings(max_examples=300, deadline=None)
def test_what_is_left_out_is_replaced(table: AssignmentTable, data: st.DataObject) -> None:
    low = np.array([data.draw(st.integers(0, MOST - 1)) for _ in range(SETS)])
    high = np.array([data.draw(st.integers(int(each), MOST)) for each in low])
    inside = table.within(MemoryInterval(low, high))
    kept = inside.undominated(np.ones(SETS, dtype=np.bool_))
    assert {*map(id, kept.parts)} <= {*map(id, inside.parts)} <= {*map(id, table.parts)}
    numbers = {id(part): number for number, part in enumerate(table.parts)}
    left, right = ([numbers[id(part)] for part in each.parts] for each in (inside, kept))
    for _ in range(4):
        room = np.array([data.draw(st.integers(int(a), int(b))) for a, b in zip(low, high)])
        times, fits = table.times_in(np.tile(room, (len(table), 1)), np.arange(len(table)))
        assert not fits[[n for n in range(len(table)) if n not in left]].any()
        moves = np.nan_to_num(table.moves)
        for number in (n for n in left if fits[n]):
            no_worse = (
                fits[right]
                & (times[right] <= times[number]).all(axis=1)
                & (table.idle[right] <= table.idle[number]).all(axis=1)
                & (moves[right] <= moves[number]).all(axis=1)
            )
            assert no_worse.any()


@given(tables(), st.data())
@settings(max_examples=100, deadline=None)
def test_parts_beat_only_those_that_lie_alike(table: AssignmentTable, data: st.DataObject) -> None:
    """Of a model that shares its base: what another model's layout asks for is not left out."""
    lies = np.array([data.draw(st.integers(0, 2)) for _ in table.parts])
    scarce = np.ones(SETS, dtype=np.bool_)
    kept = replace(table, lies=lies).undominated(scarce)
    apart = [
        _rows(table, lies == number).undominated(scarce) for number in range(3) if (lies == number).any()
    ]
    assert {*map(id, kept.parts)} == {id(part) for each in apart for part in each.parts}


def _rows(table: AssignmentTable, chosen: Bools) -> AssignmentTable:
    parts = [part for part, is_chosen in zip(table.parts, chosen) if is_chosen]
    rows = table.idle[chosen], table.starts[:, chosen], table.seconds[:, chosen], table.moves[chosen]
    return AssignmentTable(parts, table.nodes, table.readers, *rows, table.runs, table.joins)


@given(tables())
@settings(max_examples=200, deadline=None)
def test_a_narrower_interval_leaves_fewer_parts(table: AssignmentTable) -> None:
    """In two steps as in one; and halves of an interval are all of it."""
    whole = MemoryInterval(np.zeros(SETS, dtype=np.int64), np.full(SETS, MOST))
    for half in whole.halves():
        once, twice = table.within(half), table.within(whole).within(half)
        assert list(map(id, once.parts)) == list(map(id, twice.parts))
        assert np.array_equal(once.starts, twice.starts)
    upper, lower = whole.halves()
    assert ((lower.low == whole.low) & (upper.high == whole.high)).all()
    assert ((upper.low == whole.low) | (upper.low == lower.high + 1)).all()


@given(tables())
@settings(max_examples=100, deadline=None)
def test_memory_counts_only_where_it_is_scarce(table: AssignmentTable) -> None:
    """With room for the largest parts, and no node that is faster with more of it, times alone decide."""
    interval = MemoryInterval(np.full(SETS, MOST), np.full(SETS, MOST))
    ample = table.within(interval)
    assert not ample.tight(interval).any()
    [kept] = undominated([ample], np.full(SETS, MOST), interval)
    best = np.concatenate([ample.least_s, np.nan_to_num(ample.moves)], axis=1)
    unique = np.unique(best, axis=0)
    front = [
        row for row in unique if not any((other <= row).all() and (other < row).any() for other in unique)
    ]
    found = np.concatenate([kept.least_s, np.nan_to_num(kept.moves)], axis=1)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.array(front).tolist()))


def test_what_needs_less_memory_stays_where_a_node_may_not_fit() -> None:
    """All parts may stay on the devices, but beside the fast one no node has the room that it needs."""
    starts = np.full((STEPS, 2, NODES), NEVER, dtype=np.int64)
    starts[0], seconds = 10, np.zeros(starts.shape)
    seconds[0, 0], seconds[0, 1] = 1.0, 2.0
    idle, moves = np.array([[4, 4], [0, 0]]), np.full((2, 1), np.nan)
    table = AssignmentTable(
        [PartialAssignment(), PartialAssignment()],
        ("a", "b"),
        ("a",),
        idle,
        starts,
        seconds,
        moves,
        RUNS,
        np.ones((1, SETS)),
    )
    interval = MemoryInterval(np.zeros(SETS, dtype=np.int64), np.full(SETS, MOST))
    [kept] = undominated([table.within(interval)], np.full(SETS, MOST), interval)
    assert len(kept) == 2


@given(st.lists(tables(), min_size=2, max_size=3), st.integers(1, 12), st.integers(5, 40))
@settings(max_examples=100, deadline=None)
def test_what_may_be_within_a_limit_is_kept(some: list[AssignmentTable], most: int, limit_s: int) -> None:
    """And on a single set of devices nothing else."""
    for of in (some, list(map(_on_first_set, some))):
        left = np.full(of[0].idle.shape[1], most)
        within = [set[int]() for _ in of]
        for chosen in product(*(range(len(table)) for table in of)):
            rows = list(zip(of, chosen))
            idle = np.sum([table.idle[row] for table, row in rows], axis=0)
            busy = np.sum([table.busy[row] for table, row in rows], axis=0)
            if (idle <= left).all() and (busy < limit_s).all():
                for number, row in enumerate(chosen):
                    within[number].add(row)
        for table, found, expected in zip(of, within_limit(of, left, float(limit_s)), within):
            kept = {n for n, part in enumerate(table.parts) if any(part is each for each in found.parts)}
            assert kept == expected if len(left) == 1 else kept >= expected


def _on_first_set(table: AssignmentTable) -> AssignmentTable:
    return replace(table, idle=table.idle[:, :1], runs=table.runs[:, :1], joins=table.joins[:, :1])
