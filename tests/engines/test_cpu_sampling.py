"""Sampling by the kernel for CPUs, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hflow.runtime import sampling
from hflow.runtime.engines.megatron.cpu_kernels import library
from hflow.runtime.engines.megatron.cpu_kernels.sampling import sample

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")
BLOCK = 512  # words whose weights are summed before they go to the sum of all


def shares(logits: Tensor, temperature: float) -> Tensor:
    """What share of the probability lies before each word, and before the one after the last."""
    p = torch.softmax(logits.double() / temperature, -1)
    return torch.cat([p.new_zeros(len(p), 1), p.cumsum(-1)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("words", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 32_000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_words_are_where_their_share_of_the_probability_is(
    words: int, temperature: float, dtype: torch.dtype
) -> None:
    logits, u = (3 * torch.randn(40, words)).to(dtype), torch.rand(40, dtype=torch.float64)
    tokens, log_probs = sample(logits, u, temperature)
    before = shares(logits, temperature)
    low, high = (before.gather(1, at[:, None]).squeeze(1) for at in (tokens, tokens + 1))
    assert bool((low <= u + 1e-12).all() and (u <= high + 1e-12).all())
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4 * BLOCK), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans())
def test_it_draws_what_torch_draws(seed: int, words: int, temperature: float, truncated: bool) -> None:
    """Rounding could part the two only where u is at the border of two words, and here it is not."""
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(6, words, generator=draw)
    if truncated:
        hidden = torch.rand(6, words, generator=draw) < 0.7
        hidden[:, int(torch.randint(words, (), generator=draw))] = False
        logits = logits.masked_fill(hidden, -math.inf)
    u = torch.rand(6, dtype=torch.float64, generator=draw)
    tokens, log_probs = sample(logits, u, temperature)
    wanted, expected = sampling.sample(logits, u, temperature)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("words", [5, 2 * BLOCK + 3])
def test_words_without_probability_are_never_drawn(words: int) -> None:
    """Not for the least and the greatest numbers either, nor where only the last word can be."""
    extremes = torch.tensor([0.0, math.nextafter(1, 0), 0.5], dtype=torch.float64)
    only_last = torch.full((3, words), -math.inf)
    only_last[:, -1] = -3.0
    assert sample(only_last, extremes, 1.0)[0].tolist() == [words - 1] * 3
    assert sample(only_last.flip(1), extremes, 1.0)[0].tolist() == [0] * 3
    middle = torch.full((3, words), -math.inf)
    middle[:, 2:4] = torch.tensor([700.0, 700.0])
    assert sample(middle, extremes, 1.0)[0].tolist() == [2, 3, 3]
    assert sample(middle, extremes, 1.0)[1].tolist() == pytest.approx([-math.log(2)] * 3)


def test_rounding_draws_no_word_that_is_not_there() -> None:
    """The greatest number times the sum of all may be what the sum by another order is."""
    logits = 3 * torch.randn(400, BLOCK + 90)
    logits[:, -20:] = -math.inf
    greatest = torch.full((400,), math.nextafter(1, 0), dtype=torch.float64)
    tokens, log_probs = sample(logits, greatest, 1.0)
    assert bool((tokens < BLOCK + 70).all()) and bool(log_probs.isfinite().all())


def test_the_most_likely_word_is_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -2.0, -1.0]])
    tokens, log_probs = sample(logits, torch.rand(2, dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1, 0]
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-7)


def test_threads_change_nothing() -> None:
    logits, u, threads = torch.randn(16, 20_000), torch.rand(16, dtype=torch.float64), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(sample(logits, u, 0.7))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
