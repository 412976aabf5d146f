"""Losses of reward and cost models: against formulas written out, as probabilities, and by differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hflow.ops.pairwise import bradley_terry, cost, pair_accuracy
from tests.ops.examples import tensor
from tests.ops.test_gradients import differences, gradient

SCORES = [[1.5, -0.5], [0.2, 0.9], [-3.0, -3.0], [40.0, -40.0]]
THREE = [[1.0, 0.5, -2.0], [0.1, 0.3, 0.2]]
SIGNS = [[1.0, -1.0], [1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]
TIES = [0.0, 1.0, 1.0, 0.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nll(x: float) -> float:
    return -math.log(sigmoid(x))


def test_the_loss_is_that_of_bradley_and_terry() -> None:
    loss, margin, accuracy, mean = bradley_terry(tensor(SCORES))
    assert loss.tolist() == pytest.approx([nll(a - b) for a, b in SCORES], rel=1e-12, abs=1e-30)
    assert margin.tolist() == pytest.approx([2.0, -0.7, 0.0, 80.0])
    assert accuracy.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert mean.tolist() == pytest.approx([0.5, 0.55, -3.0, 0.0])


def test_a_score_far_wrong_costs_its_difference_and_no_more() -> None:
    """log sigmoid of -200 overflows where exp is taken first."""
    loss = bradley_terry(torch.tensor([[-100.0, 100.0]]))[0]
    assert loss.tolist() == pytest.approx([200.0])


def test_margins_add_up() -> None:
    margins = tensor([0.5, 1.0, 0.0, 2.0])
    loss = bradley_terry(tensor(SCORES), margins, margin=0.3)[0]
    expected = [nll(a - b - 0.3 - m) for (a, b), m in zip(SCORES, margins.tolist())]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-30)


@pytest.mark.parametrize("threshold", [1e-3, 0.4, 3.0])
@pytest.mark.parametrize("scores", SCORES[:3])
def test_win_loss_and_tie_have_probabilities_that_sum_to_one(scores: list[float], threshold: float) -> None:
    """Rao and Kupper: a beats b with probability e^a / (e^a + e^t e^b)."""
    x, no, yes = tensor([scores]), tensor([0.0]), tensor([1.0])
    of = lambda x, tie: math.exp(-bradley_terry(x, None, tie, tie_threshold=threshold)[0].item())  # noqa: E731
    win, loss, tie = of(x, no), of(x.flip(1), no), of(x, yes)
    a, b = map(math.exp, scores)
    assert win == pytest.approx(a / (a + math.exp(threshold) * b), rel=1e-9)
    assert win + loss + tie == pytest.approx(1.0, abs=1e-12)
    if scores[0] == scores[1]:
        assert tie == pytest.approx(math.tanh(threshold / 2), rel=1e-9)


def test_a_tie_is_no_pair_to_be_right_about() -> None:
    accuracy = bradley_terry(tensor(SCORES), None, tensor(TIES), tie_threshold=0.5)[2]
    assert accuracy.tolist() == [1.0, 0.5, 0.5, 1.0]


def test_centring_penalises_the_sum_of_the_scores() -> None:
    plain, centred = (bradley_terry(tensor(SCORES), centre_coef=c)[0] for c in (0.0, 0.25))
    assert (centred - plain).tolist() == pytest.approx([0.25 * (a + b) ** 2 for a, b in SCORES])


def test_of_three_responses_all_pairs_count() -> None:
    loss, _, accuracy, _ = bradley_terry(tensor(THREE))
    expected = [(nll(a - b) + nll(a - c) + nll(b - c)) / 3 for a, b, c in THREE]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert accuracy.tolist() == pytest.approx([1.0, 1 / 3])
    assert pair_accuracy(tensor(THREE)).tolist() == accuracy.tolist()


def test_the_cost_loss_has_a_term_for_the_order_and_one_for_each_sign() -> None:
    loss, margin, accuracy, agrees = cost(tensor(SCORES), tensor(SIGNS), margin=0.1, sign_coef=0.5)
    expected = [
        nll(a - b - 0.1) + 0.5 * sum(nll(s * x) for s, x in ((s, a), (t, b)) if s)
        for (a, b), (s, t) in zip(SCORES, SIGNS)
    ]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-30)
    assert margin.tolist() == pytest.approx([2.0, -0.7, 0.0, 80.0])
    assert accuracy.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert agrees.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [0.5, 0.5]]


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: bradley_terry(x)[0],
    "everything on": lambda x: bradley_terry(
        x, tensor([0.5, 0.0, 0.0, 1.0]), tensor(TIES), margin=0.2, tie_threshold=0.7, centre_coef=0.1
    )[0],
    "cost": lambda x: cost(x, tensor(SIGNS), margin=0.2, sign_coef=0.7)[0],
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_gradients_are_finite_differences(loss: Callable[[Tensor], Tensor]) -> None:
    at = tensor([*SCORES[:3], [4.0, -4.0]])
    found = gradient(loss, at)
    assert torch.allclose(found, differences(loss, at), rtol=1e-6, atol=1e-8)
    assert found.any(1).all()


def test_gradients_are_those_of_plain_pytorch() -> None:
    at = tensor(SCORES)
    plain = lambda x: -torch.sigmoid(x[:3, 0] - x[:3, 1] - 0.2).log()  # noqa: E731
    found = gradient(lambda x: bradley_terry(x[:3], margin=0.2)[0], at)
    assert torch.allclose(found, gradient(plain, at), rtol=1e-12)


TWO, THIRD = torch.zeros(2, 2), torch.zeros(2, 3)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: bradley_terry(TWO[:, :1]), "at least two responses"),
    (lambda: bradley_terry(THIRD, TWO[0]), "are of two responses to a prompt, and these are 3"),
    (lambda: bradley_terry(TWO, None, TWO[0]), "`tie` needs a `tie_threshold` above 0"),
    (lambda: bradley_terry(TWO, None, TWO[0] + 0.5, tie_threshold=1.0), "`tie` is 1"),
    (lambda: cost(THIRD, THIRD), "these are 3"),
    (lambda: cost(TWO, TWO + 2), "a sign is 1"),
    (lambda: pair_accuracy(TWO[:, :1]), "at least two responses"),
]


@pytest.mark.parametrize(("call", "problem"), REFUSED)
def test_what_is_no_preference_is_refused(call: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()
