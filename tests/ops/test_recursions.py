"""What runs along a response (rewards, GAE, returns) or over a batch (whitening), against plain loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hflow.ops.gae import gae
from hflow.ops.kl import estimate
from hflow.ops.returns import discounted_returns
from hflow.ops.shaping import sequence_rewards, token_rewards
from hflow.ops.whitening import whiten, whiten_scores
from tests.ops.examples import LOGPROBS, PER_ROW, PER_TOKEN, REF, VALUES, cells, mask, tensor, tokens

BOOK = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - d - 1,
}


@pytest.mark.parametrize("kind", BOOK)
def test_kl_estimates(kind: str) -> None:
    found = estimate(tensor(LOGPROBS), tensor(REF), mask(), kind)
    for row, column in cells():
        d = REF[row][column] - LOGPROBS[row][column]
        expected = BOOK[kind](d) if column in tokens(row) else 0.0
        assert found[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_an_unknown_kl_is_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3"):
        estimate(tensor(LOGPROBS), tensor(REF), mask(), "k4")


POLICY, REFERENCE = [0.5, 0.2, 0.3], [0.1, 0.6, 0.3]


@pytest.mark.parametrize("kind,unbiased", [("k1", True), ("k2", False), ("k3", True)])
def test_which_kl_estimates_are_unbiased(kind: str, unbiased: bool) -> None:
    """Their expectation over all tokens of a small vocabulary, exactly."""
    each = estimate(tensor([POLICY]).log(), tensor([REFERENCE]).log(), torch.ones(1, 3).bool(), kind)
    kl = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE))
    assert ((tensor([POLICY]) * each).sum().item() == pytest.approx(kl, abs=1e-12)) == unbiased


def _divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """What the gradient of an estimate is said to be the gradient of."""
    forward, reverse = (p * (p / q).log()).sum(), (q * (q / p).log()).sum()
    return {"k1": 0 * forward, "k2": forward, "k3": reverse}[kind]


@pytest.mark.parametrize("kind", BOOK)
def test_the_gradients_of_kl_estimates_are_the_documented_ones(kind: str) -> None:
    """Expected gradient of a loss over sampled tokens: the sampling itself is not differentiated."""
    logits = tensor(POLICY).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    each = estimate(logprobs[None], tensor([REFERENCE]).log(), torch.ones(1, 3).bool(), kind)[0]
    (found,) = torch.autograd.grad((logprobs.exp().detach() * each).sum(), logits)
    divergence = _divergence(kind, logits.softmax(0), tensor(REFERENCE))
    (expected,) = torch.autograd.grad(divergence, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3, -0.5])
def test_token_rewards(kl_coef: float) -> None:
    given = (tensor(PER_ROW), tensor(LOGPROBS), tensor(REF), mask())
    rewards, kl = token_rewards(*given, kl_coef=kl_coef)
    assert kl.shape == (4,)
    for row, score in enumerate(PER_ROW):
        expected = [0.0] * 5
        total = 0.0
        for column in tokens(row):
            each = LOGPROBS[row][column] - REF[row][column]
            total += each
            expected[column] = -kl_coef * each + (score if column == tokens(row)[-1] else 0.0)
        assert rewards[row].tolist() == pytest.approx(expected, abs=1e-12)
        assert kl[row].item() == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3, -0.5])
def test_sequence_rewards(kl_coef: float) -> None:
    given = (tensor(PER_ROW), tensor(LOGPROBS), tensor(REF), mask())
    rewards, kl = sequence_rewards(*given, kl_coef=kl_coef)
    for row, score in enumerate(PER_ROW):
        total = sum(LOGPROBS[row][column] - REF[row][column] for column in tokens(row))
        assert kl[row].item() == pytest.approx(total, abs=1e-12)
        assert rewards[row].item() == pytest.approx(score - kl_coef * total, abs=1e-12)


@pytest.mark.parametrize("shaped", ["token", "sequence"])
def test_maximising_the_rewards_minimises_the_divergence(shaped: str) -> None:
    """The expected policy gradient without a score, over responses of one token: exactly that of -c KL."""
    logits, ones = tensor(POLICY).log().requires_grad_(), torch.ones(3, 1).bool()
    logprobs = logits.log_softmax(0)
    given = (torch.zeros(3), logprobs.detach()[:, None], tensor(REFERENCE).log()[:, None], ones)
    function = {"token": token_rewards, "sequence": sequence_rewards}[shaped]
    rewards = function(*given, kl_coef=0.3)[0].flatten()
    (found,) = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits)
    divergence = _divergence("k2", logits.softmax(0), tensor(REFERENCE))  # KL(policy || reference)
    (expected,) = torch.autograd.grad(-0.3 * divergence, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_token_rewards_puts_the_score_on_the_last_token_that_counts() -> None:
    zeros = torch.zeros(4, 5, dtype=torch.float64)
    rewards, _ = token_rewards(tensor(PER_ROW), zeros, zeros, mask())
    assert rewards.tolist() == [[0, 0, 0, 1.5, 0], [0, 0, 0, 0, -0.7], [0, 0, -2.0, 0, 0], [0] * 5]


def book_gae(row: int, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """The sum of (gamma lam)^l delta over the tokens that count, which is GAE's definition."""
    at = tokens(row)
    v = [VALUES[row][column] for column in at] + [0.0]
    r = [PER_TOKEN[row][column] for column in at]
    delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(at))]
    advantages, returns = [0.0] * 5, [0.0] * 5
    for i, column in enumerate(at):
        advantages[column] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
        returns[column] = advantages[column] + v[i]
    return advantages, returns


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    advantages, returns = gae(tensor(VALUES), tensor(PER_TOKEN), mask(), gamma=gamma, lam=lam)
    for row in range(4):
        expected = book_gae(row, gamma, lam)
        assert advantages[row].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns[row].tolist() == pytest.approx(expected[1], abs=1e-12)


def test_gae_with_lambda_1_trusts_only_the_rewards() -> None:
    """Then the values telescope, and returns are discounted sums of rewards, whatever the critic says."""
    _, returns = gae(tensor(VALUES), tensor(PER_TOKEN), mask(), gamma=0.9, lam=1.0)
    expected = discounted_returns(tensor(PER_TOKEN), mask(), gamma=0.9)
    assert returns.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_discounted_returns(gamma: float) -> None:
    found = discounted_returns(tensor(PER_TOKEN), mask(), gamma=gamma)
    for row in range(4):
        expected, at = [0.0] * 5, tokens(row)
        for i, column in enumerate(at):
            expected[column] = sum(gamma**j * PER_TOKEN[row][later] for j, later in enumerate(at[i:]))
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten(shift_mean: bool) -> None:
    flat = [PER_TOKEN[row][column] for row, column in cells() if column in tokens(row)]
    mean, deviation = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 0.01)
    found = whiten(tensor(PER_TOKEN), mask(), shift_mean=shift_mean, eps=0.01)
    for row, column in cells():
        whitened = (PER_TOKEN[row][column] - mean) / deviation + (0.0 if shift_mean else mean)
        expected = whitened if column in tokens(row) else 0.0
        assert found[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_whitened_scores_have_mean_0_and_variance_1() -> None:
    found = whiten_scores(tensor(PER_ROW)).tolist()
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-12)
    assert statistics.variance(found) == pytest.approx(1, abs=1e-7)  # eps is 1e-8 of a variance of 5


@pytest.mark.parametrize("shift_mean,expected", [(True, 0.0), (False, 3.0)])
def test_whitening_without_variance(shift_mean: bool, expected: float) -> None:
    """Equal numbers, a single one, none at all."""
    equal, one = torch.full((2, 3), 3.0), torch.tensor([[False, True, False]] * 2)
    one[1] = False
    assert whiten(equal, torch.ones(2, 3).bool(), shift_mean=shift_mean).tolist() == [[expected] * 3] * 2
    assert whiten(equal, one, shift_mean=shift_mean).tolist() == [[0, expected, 0], [0, 0, 0]]
    assert whiten(equal, torch.zeros(2, 3).bool(), shift_mean=shift_mean).tolist() == [[0.0] * 3] * 2
    assert whiten_scores(torch.tensor([3.0]), shift_mean=shift_mean).tolist() == [expected]


RECURSIONS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("rewards", lambda x: token_rewards(tensor(PER_ROW), x, x.clone(), mask(), kl_coef=1.0)[0]),
    ("advantages", lambda x: gae(x, x.clone(), mask())[0]),
    ("returns", lambda x: discounted_returns(x, mask())),
    ("whitened", lambda x: whiten(x, mask())),
]


@pytest.mark.parametrize("function", [f for _, f in RECURSIONS], ids=[name for name, _ in RECURSIONS])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_has_no_effect(
    function: Callable[[Tensor], Tensor], junk: float
) -> None:
    clean = tensor(LOGPROBS).masked_fill(~mask(), 0)
    assert torch.equal(function(clean.masked_fill(~mask(), junk)), function(clean))
    assert (function(clean) != 0).any()


def test_recursions_keep_float32() -> None:
    x = torch.tensor(PER_TOKEN)
    outputs = (*gae(x, x, mask()), *token_rewards(x[:, 0], x, x, mask()), discounted_returns(x, mask()))
    assert {output.dtype for output in (*outputs, whiten(x, mask()), whiten_scores(x[:, 0]))} == {
        torch.float32
    }
