"""Counter-based random numbers and sampling by inversion."""

from __future__ import annotations

import math

import pytest
import torch

from hflow.runtime.sampling import WORDS, _inverted, sample, splitmix, uniform


def test_splitmix_is_the_published_generator() -> None:
    """The first outputs for seed 1234567 of the reference C program (rosettacode.org, Splitmix64)."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(5)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    assert [x % 2**64 for x in splitmix(signed).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_are_uniform() -> None:
    """Kolmogorov-Smirnov over rows and positions: sqrt(n) D exceeds 1.95 once in a thousand."""
    rows, positions = torch.meshgrid(torch.arange(400), torch.arange(250), indexing="ij")
    u = uniform(7, 3, rows, positions).flatten().sort().values
    count = len(u)
    steps = torch.arange(count, dtype=torch.float64) / count
    distance = torch.maximum((u - steps).abs().max(), (u - steps - 1 / count).abs().max()).item()
    assert distance * math.sqrt(count) < 1.95
    assert u[0] >= 0 and u[-1] < 1 and len(u.unique()) == count


@pytest.mark.parametrize(
    "other",
    [(8, 3, 0, 0, 0), (7, 4, 0, 0, 0), (7, 3, 1, 0, 0), (7, 3, 0, 1, 0), (7, 3, 0, 0, 1), (7, 3, 0, 1, 1)],
)
def test_neighbouring_counters_are_uncorrelated(other: tuple[int, int, int, int, int]) -> None:
    rows = torch.arange(50_000)
    a = uniform(7, 3, rows, 0)
    seed, step, row, position, stream = other
    b = uniform(seed, step, rows + row, position, stream)
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(len(rows))


def test_numbers_do_not_depend_on_batching() -> None:
    rows = torch.tensor([5, 2**40, 9])
    one_by_one = torch.cat([uniform(1, 2, rows[i : i + 1], 3) for i in range(3)])
    assert torch.equal(uniform(1, 2, rows, 3), one_by_one)
    assert torch.equal(uniform(1, 2, rows, torch.tensor([3, 3, 3])), one_by_one)
    together = uniform(1, 2, rows[:, None], torch.arange(7), 4)
    assert torch.equal(together, torch.stack([uniform(1, 2, rows, p, 4) for p in range(7)], 1))


def test_stream_zero_draws_what_runs_without_streams_drew() -> None:
    """By Python's integers, from the published definition of SplitMix64."""

    def mix(state: int) -> int:
        x = (state + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for row in (0, 5, 2**40):
        state = 0
        for counter in (11, 3, row, 7):
            state = mix((state + counter) % 2**64)
        assert uniform(11, 3, torch.tensor([row]), 7).item() == (state >> 11) * 2.0**-53
        assert uniform(11, 3, torch.tensor([row]), 7, stream=0).item() == (state >> 11) * 2.0**-53
        assert uniform(11, 3, torch.tensor([row]), 7, stream=2).item() == (mix(state + 2) >> 11) * 2.0**-53


def test_samples_follow_the_distribution() -> None:
    """Chi-square with 4 degrees of freedom exceeds 18.5 once in a thousand."""
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0, -1.0, 0.5])
    count, temperature = 20_000, 0.8
    u = uniform(0, 0, torch.arange(count), 0)
    tokens, _ = sample(logits.expand(count, -1), u, temperature)
    expected = (logits.double() / temperature).softmax(-1) * count
    observed = tokens.bincount(minlength=6).double()
    assert observed[2] == 0
    possible = expected > 0
    assert (((observed - expected) ** 2 / expected)[possible]).sum() < 18.5


def test_inverse_at_the_edges() -> None:
    """Tokens of probability 1/4, 0, 1/2, 1/4: the edges belong to the token that begins there."""
    logits = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).log().expand(6, -1)
    below_one = 1 - 2.0**-53
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, below_one], dtype=torch.float64)
    tokens, log_probs = sample(logits, u, 1.0)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(log_probs, logits[range(6), tokens])


def test_the_last_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[0.3, 0.1, -torch.inf]]).repeat(1000, 1)
    u = torch.full((1000,), 1 - 2.0**-53, dtype=torch.float64)
    assert sample(logits, u, 1.0)[0].unique().tolist() == [1]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sample(logits, uniform(0, 0, torch.arange(50), 0), 0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("words", [WORDS, WORDS + 1, 5 * WORDS, 5 * WORDS + 77])
def test_blocks_of_a_large_vocabulary_draw_what_cumulative_sums_do(words: int) -> None:
    """Also at both ends of [0, 1), and never a token that was left out."""
    generator = torch.Generator().manual_seed(words)
    logits = 3 * torch.randn(40, words, generator=generator)
    logits[:, torch.rand(words, generator=generator) < 0.5] = -torch.inf
    logits[:, WORDS : 2 * WORDS] = -torch.inf  # a whole block
    logits[:, 3] = 0.0
    u = torch.rand(40, dtype=torch.float64, generator=generator)
    u[:3] = torch.tensor([0.0, 1 - 2**-53, 1 - 2**-52], dtype=torch.float64)
    cumulative = torch.log_softmax(logits.double() / 0.9, -1).exp().cumsum(-1)
    expected = [int((row > share * row[-1]).nonzero()[0]) for row, share in zip(cumulative[3:], u[3:])]
    tokens, _ = sample(logits, u, 0.9)
    assert tokens[3:].tolist() == expected
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    present = logits[0].isfinite().nonzero().squeeze(1).tolist()
    assert tokens[:3].tolist() == [present[0], present[-1], present[-1]]


def test_a_block_that_begins_beyond_the_target_by_rounding() -> None:
    """0.1 + 0.2 - 0.2 is more than 0.1: the block's first word, of weight 0, would be drawn."""
    weights = torch.zeros(1, 3 * WORDS, dtype=torch.float64)
    weights[0, [0, WORDS + 5, 2 * WORDS]] = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    assert _inverted(weights, torch.tensor([0.1], dtype=torch.float64)).tolist() == [WORDS + 5]
