"""Truncation against transformers' own, borders where it leaves them open, and what is told of the sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hflow.graph.infer.kinds.generate import END_TOKEN, LENGTH, STOP
from hflow.graph.types import Truncation
from hflow.runtime.ends import EndRule
from hflow.runtime.kept import KeptCollector, KeptSets, joined_sets
from hflow.runtime.rows import concatenate
from hflow.runtime.sampling import sample
from hflow.runtime.truncation import kept_tokens, truncate


def of_transformers(logits: Tensor, temperature: float, truncation: Truncation) -> Tensor:
    """Whether each token stays, by transformers' warpers in the order of its `generate`."""
    no_ids: Any = None
    scores: Any = logits.clone()
    scores = TemperatureLogitsWarper(temperature)(no_ids, scores)
    if truncation.top_k is not None:
        scores = TopKLogitsWarper(truncation.top_k)(no_ids, scores)
    if truncation.top_p is not None:
        scores = TopPLogitsWarper(truncation.top_p)(no_ids, scores)
    if truncation.min_p is not None:
        scores = MinPLogitsWarper(truncation.min_p)(no_ids, scores)
    return scores > -torch.inf


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 3),
    truncation=st.builds(
        Truncation,
        st.none() | st.integers(1, 60),
        st.none() | st.floats(0.01, 0.99),
        st.none() | st.floats(0.01, 1.0),
    ),
)
def test_the_same_tokens_stay_as_with_transformers(
    seed: int, temperature: float, truncation: Truncation
) -> None:
    logits = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(seed))
    expected = of_transformers(logits, temperature, truncation)
    assert torch.equal(kept_tokens(logits, temperature, truncation), expected)


def test_ties_are_cut_in_one_way() -> None:
    """All that tie with the k-th stay (as in transformers); of equals, `top_p` takes the lower ids, where
    transformers takes what an unstable sort brings first."""
    logits = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 1.0]])
    assert kept_tokens(logits, 1.0, Truncation(top_k=1)).tolist() == [[0, 1, 0, 1, 0, 0, 0]]
    equal = torch.zeros(1, 10)
    assert kept_tokens(equal, 1.0, Truncation(top_p=0.45)).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 4]
    assert kept_tokens(equal, 1.0, Truncation(min_p=1.0)).all()
    assert (
        kept_tokens(equal, 1.0, Truncation(top_p=0.45)).sum()
        == of_transformers(equal, 1.0, Truncation(top_p=0.45)).sum()
    )


def test_draws_follow_the_truncated_distribution() -> None:
    """Pearson's chi-square over 20,000 draws; 21.67 is its 99 % quantile at 9 degrees of freedom."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3))
    truncation, temperature, count = Truncation(top_k=10), 0.8, 20_000
    inside = of_transformers(logits[None], temperature, truncation)[0]
    expected = (logits / temperature).masked_fill(~inside, -torch.inf).softmax(-1)
    rows = logits.expand(count, -1).clone()
    truncate(rows, temperature, truncation)
    u = torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tokens, log_probs = sample(rows, u, temperature)
    assert torch.allclose(log_probs, expected.log()[tokens], atol=1e-5)
    seen = torch.bincount(tokens, minlength=40)
    assert seen[~inside].sum() == 0
    p = expected[inside]
    assert ((seen[inside] - count * p) ** 2 / (count * p)).sum() < 21.67


def as_lists(sets: KeptSets) -> list[list[int]]:
    return [[i for i in row if i >= 0] for row in sets.padded().tolist()]


def test_kept_sets_are_moved_cut_and_joined_as_rows() -> None:
    """A plain list of lists is the oracle."""
    generator = torch.Generator().manual_seed(0)
    told = [[[1, 4], [2], [0, 3, 5]], [[7]], [[], [6]]]
    lengths = torch.tensor([3, 1, 2])
    counts = torch.tensor([len(s) for row in told for s in row])
    ids = torch.tensor([i for row in told for s in row for i in s])
    sets = KeptSets.of(counts, ids, lengths)
    assert as_lists(sets) == [s for row in told for s in row]
    order = torch.randint(3, (5,), generator=generator)
    assert as_lists(sets.take(order)) == [s for r in order.tolist() for s in told[r]]
    assert as_lists(sets.without(torch.tensor([True, False, False]))) == [[], [], [], [7], [], [6]]
    gap = KeptSets.empty(torch.tensor([0, 2, 1]))
    joined = joined_sets([sets, gap, sets])
    expected = [[*row, *[[]] * n, *row] for row, n in zip(told, (0, 2, 1))]
    assert as_lists(joined) == [s for row in expected for s in row]
    both = concatenate([sets.rows.slice(0, 2), sets.rows.slice(2, 3)])
    assert as_lists(KeptSets(both, lengths)) == as_lists(sets)


def test_a_row_with_too_large_a_set_has_empty_ones() -> None:
    collector = KeptCollector(3, most=2)
    first = torch.zeros(3, 6, dtype=torch.bool)
    first[0, 1] = first[1, :2] = first[2, 4] = True
    second = torch.zeros(2, 6, dtype=torch.bool)
    second[0, :3] = second[1, 5] = True
    collector.add(torch.tensor([0, 1, 2]), first)
    collector.add(torch.tensor([1, 2]), second)
    sets, overflown = collector.collected()
    assert overflown.tolist() == [False, True, False]
    assert as_lists(sets) == [[1], [], [], [4], [5]]
    assert sets.lengths.tolist() == [1, 2, 2]


def spelled(rows: Any) -> list[str]:
    """Tokens 10.. are letters."""
    letters = {10: "a", 11: "b", 12: "<", 13: "/s", 14: ">", 15: "b>"}
    return ["".join(letters.get(i, "") for i in row) for row in rows]


@pytest.mark.parametrize(
    ("response", "end"),
    [
        ([10, 11, 12, 13, 14, 10], (5, STOP)),  # </s> over three tokens
        ([10, 12, 13, 15, 10], (5, LENGTH)),  # </sb> has no </s>
        ([10, 1, 12], (2, END_TOKEN)),
        ([10, 7, 12], (2, STOP)),
        ([12, 13, 14], (3, STOP)),
        ([10, 11], (2, LENGTH)),
    ],
)
def test_a_response_ends_where_its_text_first_has_a_stop(response: list[int], end: tuple[int, int]) -> None:
    ends = EndRule(1, frozenset({7}), ("</s>",), spelled)
    assert ends.first(response) == end
    brute = next(
        (
            n
            for n in range(1, len(response) + 1)
            if {1, 7} & {response[n - 1]} or "</s>" in spelled([response[:n]])[0]
        ),
        len(response),
    )
    assert end[0] == brute
    going = ends.going(torch.tensor([response[: end[0]]]))
    assert going.tolist() == [end[1] == LENGTH]
    assert ends.now([response[: end[0]]]) == [end[1]]
