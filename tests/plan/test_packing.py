"""Rows packed into micro-batches, against the sums and the blocks that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from math import ceil, inf
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.graph.ir import Head
from hflow.plan.packing import LEAST_FILL, PackedRows, TokenBudget, blocks, filled, packed
from hflow.plan.workload import Workload

LENGTH = st.integers(1, 100)
GROUPS = st.lists(st.tuples(st.lists(LENGTH, min_size=2, max_size=2), LENGTH), max_size=40).map(
    lambda found: [PackedRows(tuple(lengths), predicted) for lengths, predicted in found]
)


def cut(groups: Sequence[PackedRows], sizes: Sequence[int]) -> list[list[PackedRows]]:
    left = iter(groups)
    return [list(islice(left, size)) for size in sizes]


def need(part: Sequence[PackedRows]) -> TokenBudget:
    """In blocks found from their definition: each row in the last one whose longest it fills enough."""
    lengths = sorted((length for group in part for length in group.lengths), reverse=True)
    tokens, longest = 0.0, inf
    for length in lengths:
        longest = longest if longest * LEAST_FILL <= length else length
        tokens += longest
    return TokenBudget(tokens, sum(group.predicted for group in part))


@given(GROUPS, st.integers(100, 2000), st.integers(50, 1000))
def test_each_micro_batch_has_room(groups: list[PackedRows], tokens: int, predicted: int) -> None:
    budget = TokenBudget(tokens, predicted)
    for sizes in (filled(groups, budget), packed(groups, budget)):
        assert sum(sizes) == len(groups) and all(sizes)
        for part in cut(groups, sizes):
            needed = need(part)
            assert len(part) == 1 or (needed.tokens <= budget.tokens and needed.predicted <= budget.predicted)
    assert len(packed(groups, budget)) <= len(filled(groups, budget))


@given(GROUPS, st.integers(100, 2000), st.integers(50, 1000))
def test_the_next_group_would_have_had_no_room(groups: list[PackedRows], tokens: int, predicted: int) -> None:
    parts = cut(groups, filled(groups, TokenBudget(tokens, predicted)))
    for part, following in pairwise(parts):
        more = need([*part, following[0]])
        assert more.tokens > tokens or more.predicted > predicted


@given(st.integers(1, 60), st.integers(1, 16), st.sampled_from(get_args(Head)))
def test_rows_of_the_greatest_length_are_as_many_as_the_plan_says(rows: int, limit: int, head: Head) -> None:
    budget = TokenBudget.of(Workload(rows, prompt=20, response=12), limit, head)
    assert len(packed([PackedRows((31,), 12)] * rows, budget)) == ceil(rows / limit)


@pytest.mark.parametrize(("predicted", "head", "sizes"), [(16, "lm", 16), (32, "lm", 8), (32, "scalar", 16)])
def test_rows_of_half_the_length_are_twice_as_many(predicted: int, head: Head, sizes: int) -> None:
    """Unless they have as many logits."""
    budget = TokenBudget.of(Workload(64, prompt=32, response=32), 8, head)
    assert packed([PackedRows((32,), predicted)] * 64, budget) == [sizes] * (64 // sizes)


def test_micro_batches_are_about_equally_full() -> None:
    rows = [PackedRows((10,), 1)] * 101
    assert filled(rows, TokenBudget(500, inf)) == [50, 50, 1]
    assert packed(rows, TokenBudget(500, inf)) == [34, 34, 33]


def test_blocks_are_full_enough() -> None:
    assert blocks([100, 80, 75, 74, 60, 10]) == [(3, 100), (2, 74), (1, 10)]
    assert blocks([]) == []


@pytest.mark.parametrize("rows", [1, 3])
def test_a_group_that_is_too_long_is_alone(rows: int) -> None:
    assert packed([PackedRows((900,), 9)] * rows, TokenBudget(500, 50)) == [1] * rows
