"""The order of mixtures and curricula: shares against published apportionments and a sequential oracle,
passes against counts, and that all of it is a function of seed, step and stream."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.graph.row_sources import Curriculum
from hflow.runtime.datasets import Dataset
from hflow.runtime.row_order import RowOrder, groups_of, webster

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def mixture(sizes: list[int], weights: list[float], curriculum: Curriculum | None = None) -> RowOrder:
    """Sources whose rows are numbered one after the other; row n is as hard as n * 7 modulo the rows."""
    of = [place for place, size in enumerate(sizes) for _ in range(size)]
    hard = [float(n * 7 % len(of)) for n in range(len(of))] if curriculum else None
    return RowOrder(groups_of([f"s{i}" for i in range(len(sizes))], weights, of, hard), curriculum)


def test_shares_are_those_of_published_elections() -> None:
    """The example of Wikipedia's article on Sainte-Laguë's method, and Balinski & Young, Fair Representation
    (1982), whose five methods differ: Hamilton's gives (9, 7, 5, 4, 1)."""
    assert webster(tuple(map(Fraction, (53000, 24000, 23000))), 7) == (3, 2, 2)
    assert webster(tuple(map(Fraction, (9061, 7179, 5259, 3319, 1182))), 26) == (9, 8, 5, 3, 1)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(WEIGHTS, st.integers(0, 60))
def test_shares_are_those_of_one_row_after_the_other(weights: list[int], total: int) -> None:
    counts = [0] * len(weights)
    for _ in range(total):
        gains = [Fraction(w, 2 * c + 1) for w, c in zip(weights, counts)]
        counts[gains.index(max(gains))] += 1
    assert list(webster(tuple(map(Fraction, weights)), total)) == counts


def test_whole_shares_are_in_every_batch_and_others_take_turns() -> None:
    order = mixture([100, 100], [3, 1])
    assert [order.counts(step, 8) for step in range(5)] == [(6, 2)] * 5
    assert [order.counts(step, 2) for step in range(4)] == [(2, 0), (1, 1), (2, 0), (1, 1)]
    tenths = mixture([100, 100, 100], [0.1, 0.2, 0.7])
    assert [tenths.counts(step, 10) for step in range(9)] == [(1, 2, 7)] * 9, "0.1 is a tenth"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data(), WEIGHTS.filter(lambda w: len(w) > 1), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_every_source_is_passed_over_without_replacement(
    data: st.DataObject, weights: list[int], size: int, shuffle: bool, stream: int
) -> None:
    order = mixture([data.draw(st.integers(2 * size, 40)) for _ in weights], list(map(float, weights)))
    drawn: dict[int, list[int]] = {place: [] for place in range(len(weights))}
    for step in range(30):
        batch = order.batch(11, step, size, shuffle, stream)
        assert len(batch) == len(set(batch)) == size, "rows of a batch are distinct"
        for place, group in enumerate(order.groups):
            own = [row for row in batch if row in set(group.rows.tolist())]
            assert len(own) == order.counts(step, size)[place]
            drawn[place] += own
    counted = Counter(row for rows in drawn.values() for row in rows)
    for group in order.groups:
        times = [counted[row] for row in group.rows.tolist()]
        assert max(times) - min(times) <= 1, "nothing comes twice before all have come once"


def test_rows_of_sources_are_spread_over_a_batch() -> None:
    batch = mixture([50, 50], [3, 1]).batch(0, 0, 8)
    assert [row >= 50 for row in batch].count(True) == 2
    for half in (batch[:4], batch[4:]):
        assert sum(row >= 50 for row in half) == 1, "each half of the devices gets its share"


def test_seeds_streams_and_sources_have_orders_of_their_own() -> None:
    order = mixture([64, 64], [1, 1])
    drawn = {key: order.batch(key[0], 0, 32, True, key[1]) for key in ((1, 0), (2, 0), (1, 1))}
    assert len({tuple(rows) for rows in drawn.values()}) == 3
    first, second = (sorted(r % 64 for r in drawn[1, 0] if (r >= 64) == late) for late in (False, True))
    assert first != second
    again = mixture([64, 64], [1, 1])
    assert again.batch(1, 0, 32) == drawn[1, 0], "nothing is remembered from step to step"


def test_a_growing_curriculum_draws_from_the_easiest_share() -> None:
    order = mixture([100], [1], Curriculum("level", steps=10, start=0.2))
    hard = {n: n * 7 % 100 for n in range(100)}
    greatest = []
    for step in range(10):
        batch = order.batch(3, step, 8)
        assert len(set(batch)) == 8
        bound = 100 * (0.2 + 0.8 * step / 10)
        assert all(hard[row] < bound for row in batch), step
        greatest.append(max(hard[row] for row in batch))
    assert greatest[-1] > 60 > 20 > greatest[0]
    later = [row for step in range(10, 22) for row in order.batch(3, step, 8)]
    assert len(set(later)) == 96, "then passes over all rows, each to its last whole batch"


def test_a_sorted_curriculum_goes_from_easy_to_hard_in_each_pass() -> None:
    levels = [row % 4 for row in range(40)]
    order = RowOrder(groups_of(["all"], [1], [0] * 40, [float(v) for v in levels]), Curriculum("level"))
    passes = [[row for step in range(5 * n, 5 * n + 5) for row in order.batch(5, step, 8)] for n in range(2)]
    for drawn in passes:
        assert sorted(drawn) == list(range(40))
        assert [levels[row] for row in drawn] == sorted(levels)
    assert passes[0] != passes[1], "equally hard rows are shuffled anew"
    plain = [row for step in range(5) for row in order.batch(5, step, 8, shuffle=False)]
    assert plain == sorted(range(40), key=lambda row: levels[row]), "or stay in file order"


def test_a_curriculum_of_a_mixture_is_one_within_each_source() -> None:
    order = mixture([60, 20], [3, 1], Curriculum("level", steps=4, start=0.5))
    for group in order.groups:
        assert group.difficulty is not None
        half = set(group.rows[np.argsort(group.difficulty)][: len(group.rows) // 2].tolist())
        assert set(order.batch(2, 0, 8)) & set(group.rows.tolist()) <= half
    assert order.counts(0, 8) == order.counts(9, 8) == (6, 2)


def test_a_source_with_fewer_rows_than_a_batch_takes_is_refused() -> None:
    dataset = Dataset("rows", tuple(range(14)), (), order=mixture([12, 2], [1, 1]))
    with pytest.raises(HflowError, match="source `s1` has 2 rows to train on, a batch takes 4 of it"):
        dataset.batch(0, 0, 8)


SHARES = st.lists(st.sampled_from([1, 2, 3, 7, 30, 100, 1000]), min_size=2, max_size=7)


@settings(max_examples=200, derandomize=True, deadline=None)
@example([1, 1, 3], 3)  # of the last, batches of 1, 3, ... rows, and ceil(9 / 5) is 2
@given(SHARES, st.integers(1, 20))
def test_the_least_rows_are_enough_for_whole_batches(weights: list[int], size: int) -> None:
    """Sources of just so many rows as are asked for, with a curriculum that grows and after it."""
    least = mixture([1] * len(weights), list(map(float, weights))).least_rows(size)
    order = mixture(list(least), list(map(float, weights)), Curriculum("level", steps=12, start=0.1))
    for step in range(16):
        times = Counter(order.batch(5, step, size))
        assert times.total() == size
        for group, count in zip(order.groups, order.counts(step, size)):
            own = [times[row] for row in group.rows.tolist()]
            assert sum(own) == count
            assert step >= 12 or max(own) <= -(-count // len(own)), "no row more often than it must"
