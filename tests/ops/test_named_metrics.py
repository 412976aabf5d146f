"""pass@k against all subsets, majorities against votes counted by hand."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hflow.ops.evaluation import majority_at_k, majority_number_at_k, pass_at_k

N = 6
PASSES = st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=1, max_size=4)


@given(PASSES, st.integers(1, N))
def test_pass_at_k_is_the_share_of_subsets_in_which_one_passes(passes: list[list[bool]], k: int) -> None:
    """Float32 of a product of at most six factors in float64."""
    expected = [sum(any(chosen) for chosen in combinations(row, k)) / comb(N, k) for row in passes]
    assert pass_at_k(torch.tensor(passes).float(), k=k).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(2000, 1, 1000), (2000, 3, 100), (5000, 4999, 2), (300, 0, 7)])
def test_pass_at_k_of_many_samples(n: int, c: int, k: int) -> None:
    """With whole numbers, where floats of the binomials would overflow."""
    score = torch.zeros(1, n)
    score[0, :c] = 1.0
    exact = 1 - comb(n - c, k) * 10**12 // comb(n, k) / 10**12
    assert pass_at_k(score, k=k).item() == pytest.approx(exact, abs=1e-6)


def test_the_threshold_is_passed_at_itself() -> None:
    score = torch.tensor([[0.4, 0.5, 0.6]])
    assert pass_at_k(score, k=1, threshold=0.5).item() == pytest.approx(2 / 3)
    assert pass_at_k(score, k=1).item() == 0.0


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 3, 1.0),
        (["8", "7", "8"], [0, 1, 0], 3, 0.0),
        (["7", "8", "8", "7"], [1, 0, 0, 1], 4, 0.5),  # two answers of two votes each
        (["7", "8", "9"], [1, 0, 0], 3, 1 / 3),  # three of one
        ([" 7", "7 ", "8"], [1, 1, 0], 3, 1.0),  # white space does not tell answers apart
        (["", "", "7"], [0, 0, 1], 3, 1.0),  # what is empty does not vote
        (["", " ", ""], [1, 1, 1], 3, 0.0),  # nobody votes
        (["7", "7", "8", "8"], [1, 1, 0, 0], 2, 0.5),  # a right pair, a wrong one
        (["8", "7", "7"], [0, 1, 1], 2, 0.5),  # a pair of two answers, and a rest that does not count
        (["7", "8"], [1, 0], 1, 0.5),
        (["7", "7", "8"], [1, 0, 0], 3, 0.5),  # graded otherwise than its equal
    ],
)
def test_the_majority(answers: list[str], right: list[int], k: int, expected: float) -> None:
    score = torch.tensor([right], dtype=torch.float32)
    assert majority_at_k([answers], score, k=k).tolist() == pytest.approx([expected])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=N, max_size=N), min_size=1, max_size=3),
    st.integers(1, N),
)
def test_numbers_vote_as_their_texts_do(rows: list[list[int]], k: int) -> None:
    score = torch.tensor(rows).eq(1).float()
    texts = [[str(number) for number in row] for row in rows]
    numbers = majority_number_at_k(torch.tensor(rows, dtype=torch.int32), score, k=k)
    assert torch.equal(numbers, majority_at_k(texts, score, k=k))


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_at_most_the_number_of_samples(k: int) -> None:
    with pytest.raises(ValueError, match="has 3 samples"):
        pass_at_k(torch.ones(1, 3), k=k)
    with pytest.raises(ValueError, match="has 3 samples"):
        majority_at_k([["1"] * 3], torch.ones(1, 3), k=k)
