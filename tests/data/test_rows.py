"""Ragged rows, against lists of lists."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hflow.runtime.rows import Rows, from_lists, joined

RAGGED = st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6)


def lists(rows: Rows) -> list[list[int]]:
    assert rows.lengths is not None
    return [part.tolist() for part in torch.split(rows.values, rows.lengths.tolist())]


@given(RAGGED.filter(bool), st.lists(st.integers(0, 5), max_size=8))
def test_rows_are_taken_in_the_order_given(rows: list[list[int]], numbers: list[int]) -> None:
    numbers = [n % len(rows) for n in numbers]
    taken = from_lists(rows).take(torch.tensor(numbers, dtype=torch.int64))
    assert lists(taken) == [rows[n] for n in numbers]
    dense = Rows(torch.tensor([len(row) for row in rows])).take(torch.tensor(numbers, dtype=torch.int64))
    assert dense.values.tolist() == [len(rows[n]) for n in numbers]


@given(st.lists(st.tuples(*[st.lists(st.integers(-9, 9), max_size=4)] * 3), max_size=6))
def test_rows_are_joined_one_by_one(rows: list[tuple[list[int], ...]]) -> None:
    parts = [from_lists([row[i] for row in rows]) for i in range(3)]
    assert lists(joined(*parts)) == [a + b + c for a, b, c in rows]
