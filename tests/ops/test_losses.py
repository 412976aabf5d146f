"""Losses per token against their formulas, written out in Python floats."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hflow.ops.distillation import reverse_kl
from hflow.ops.losses import cispo, negative_log_likelihood, ppo_clip, reinforce
from hflow.ops.sequence_losses import gspo
from hflow.ops.values import value_clip
from tests.ops.examples import (
    LOGPROBS,
    OLD,
    PER_ROW,
    PER_TOKEN,
    REF,
    ROLLOUT,
    VALUES,
    cells,
    mask,
    tensor,
    tokens,
)

GIVEN = (tensor(LOGPROBS), tensor(OLD))
ADVANTAGES = {"per response": tensor(PER_ROW), "per token": tensor(PER_TOKEN)}
by_advantages = pytest.mark.parametrize("advantages", ADVANTAGES.values(), ids=list(ADVANTAGES))


def advantage_at(advantages: Tensor, row: int, column: int) -> float:
    return (advantages[row] if advantages.dim() == 1 else advantages[row, column]).item()


def ratio_at(row: int, column: int) -> float:
    return math.exp(LOGPROBS[row][column] - OLD[row][column])


def book_surrogate(
    ratio: float, a: float, low: float, high: float, dual: float | None
) -> tuple[float, float]:
    """PPO's surrogate of one token, and 1 where its slope in the ratio is 0 because of clipping."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    if a >= 0:
        return min(ratio, clipped) * a, float(clipped < ratio and a > 0)
    kept = max(ratio, clipped)
    if dual is not None and kept > dual:
        return dual * a, 1.0
    return kept * a, float(kept > ratio)


@by_advantages
@pytest.mark.parametrize(
    "low,high,dual",
    [(0.2, None, None), (0.05, 0.3, None), (0.5, 0.28, None), (0.2, None, 3.0), (0.2, 0.4, 1.5)],
)
def test_ppo_clip(advantages: Tensor, low: float, high: float | None, dual: float | None) -> None:
    options: dict[str, Any] = {"clip": low, "clip_high": high, "dual_clip": dual, "kl_coef": 0.1}
    loss, kl, clipped = ppo_clip(*GIVEN, advantages, mask(), tensor(REF), **options)
    for row, column in cells():
        if column not in tokens(row):
            assert (loss[row, column], kl[row, column], clipped[row, column]) == (0, 0, 0)
            continue
        a = advantage_at(advantages, row, column)
        surrogate, held = book_surrogate(ratio_at(row, column), a, low, low if high is None else high, dual)
        d = REF[row][column] - LOGPROBS[row][column]
        k3 = math.exp(d) - d - 1
        assert loss[row, column].item() == pytest.approx(-surrogate + 0.1 * k3, abs=1e-12)
        assert kl[row, column].item() == pytest.approx(k3, abs=1e-12)
        assert clipped[row, column].item() == held
    assert 0 < clipped.sum() < mask().sum()


def test_the_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    """A ratio of e^5 with a negative advantage: unbounded without, and at 3 with the dual clip."""
    given = (tensor([[-1.0]]), tensor([[-6.0]]), tensor([-2.0]), torch.ones(1, 1).bool())
    assert ppo_clip(*given)[0].item() == pytest.approx(2 * math.exp(5))
    loss, _, held = ppo_clip(*given, dual_clip=3.0)
    assert (loss.item(), held.item()) == (6.0, 1.0)


@pytest.mark.parametrize("cap", [0.5, 2.0, 100.0])
def test_truncated_importance_weights(cap: float) -> None:
    plain = ppo_clip(*GIVEN, tensor(PER_ROW), mask())[0]
    loss = ppo_clip(*GIVEN, tensor(PER_ROW), mask(), rollout_logprobs=tensor(ROLLOUT), importance_cap=cap)[0]
    for row, column in cells():
        weight = min(math.exp(OLD[row][column] - ROLLOUT[row][column]), cap)
        assert loss[row, column].item() == pytest.approx(weight * plain[row, column].item(), abs=1e-12)


def test_the_entropy_bonus() -> None:
    entropy = tensor(VALUES)
    plain = ppo_clip(*GIVEN, tensor(PER_ROW), mask())[0]
    loss = ppo_clip(*GIVEN, tensor(PER_ROW), mask(), entropy=entropy, entropy_coef=0.25)[0]
    assert torch.allclose(loss, plain - 0.25 * entropy.masked_fill(~mask(), 0), atol=1e-12)
    assert torch.equal(ppo_clip(*GIVEN, tensor(PER_ROW), mask(), entropy=entropy)[0], plain)


def test_ppo_clip_measures_kl_against_the_old_policy_without_a_reference() -> None:
    _, kl, _ = ppo_clip(*GIVEN, tensor(PER_ROW), mask())
    d = OLD[0][1] - LOGPROBS[0][1]
    assert kl[0, 1].item() == pytest.approx(math.exp(d) - d - 1, abs=1e-12)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl": "k4"}, "k1, k2, k3"),
    ],
)
def test_ppo_clip_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_clip(*GIVEN, tensor(PER_ROW), mask(), **options)


def ppo_as_recorded(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor,
    *,
    clip: float,
    kl_coef: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arithmetic, operation by operation, that recorded runs of GRPO were made with."""
    ratio = (logprobs - old).masked_fill(~mask, 0).exp()
    advantage = advantages[:, None]
    plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    loss = -torch.minimum(plain, clipped).masked_fill(~mask, 0)
    log_ratio = (ref - logprobs).masked_fill(~mask, 0)
    kl = log_ratio.exp() - log_ratio - 1
    return loss + kl_coef * kl, kl, ((clipped < plain) & mask).to(loss.dtype)


def test_recorded_runs_can_be_repeated_bit_by_bit() -> None:
    """Outputs and gradients in float32, by default options, are those of the first version."""
    random = torch.Generator().manual_seed(0)
    logprobs, noise, far = -torch.rand(3, 64, 32, generator=random)
    mask, advantages = torch.rand(64, 32, generator=random) < 0.8, torch.randn(64, generator=random)
    given = (logprobs + 0.5 * noise, advantages, mask, logprobs + far)
    outcomes: list[tuple[Tensor, ...]] = []
    for function in (functools.partial(ppo_as_recorded, clip=0.2), ppo_clip):
        leaf = logprobs.clone().requires_grad_()
        outputs = function(leaf, *given, kl_coef=0.001)
        outputs[0].sum().backward()
        assert leaf.grad is not None
        outcomes.append((*outputs, leaf.grad))
    for recorded, found in zip(*outcomes):
        assert torch.equal(recorded, found)


@by_advantages
@pytest.mark.parametrize("clip,clip_high", [(1.0, 0.2), (0.3, 0.5)])
def test_cispo(advantages: Tensor, clip: float, clip_high: float) -> None:
    loss, clipped = cispo(*GIVEN, advantages, mask(), clip=clip, clip_high=clip_high)
    for row, column in cells():
        ratio = ratio_at(row, column)
        weight = min(max(ratio, 1 - clip), 1 + clip_high)
        counts = column in tokens(row)
        expected = -weight * advantage_at(advantages, row, column) * LOGPROBS[row][column]
        assert loss[row, column].item() == pytest.approx(expected if counts else 0.0, abs=1e-12)
        assert clipped[row, column].item() == float(counts and weight != ratio)
    assert 0 < clipped.sum() < mask().sum()


@by_advantages
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_reinforce(advantages: Tensor, kl_coef: float) -> None:
    loss, kl, _ = reinforce(*GIVEN, advantages, mask(), tensor(REF), kl_coef=kl_coef, kl="k2")
    for row, column in cells():
        k2 = (LOGPROBS[row][column] - REF[row][column]) ** 2 / 2
        expected = -advantage_at(advantages, row, column) * ratio_at(row, column) + kl_coef * k2
        counts = float(column in tokens(row))
        assert loss[row, column].item() == pytest.approx(counts * expected, abs=1e-12)
        assert kl[row, column].item() == pytest.approx(counts * k2, abs=1e-12)


def test_reinforce_measures_kl_against_the_old_policy_without_a_reference() -> None:
    _, kl, _ = reinforce(*GIVEN, tensor(PER_ROW), mask())
    d = OLD[0][1] - LOGPROBS[0][1]
    assert kl[0, 1].item() == pytest.approx(math.exp(d) - d - 1, abs=1e-12)
    with pytest.raises(ValueError, match="ref_logprobs"):
        reinforce(*GIVEN, tensor(PER_ROW), mask(), kl_coef=0.1)


@by_advantages
def test_the_first_update_of_reinforce_is_the_plain_one(advantages: Tensor) -> None:
    """Before the weights move, the gradient with respect to a token's log-prob is -A, exactly."""
    leaf = tensor(LOGPROBS).requires_grad_()
    (found,) = torch.autograd.grad(reinforce(leaf, tensor(LOGPROBS), advantages, mask())[0].sum(), leaf)
    for row, column in cells():
        a = advantage_at(advantages, row, column) if column in tokens(row) else 0.0
        assert found[row, column].item() == -a


def test_reinforce_is_right_for_tokens_that_older_weights_sampled() -> None:
    """Exactly, over a vocabulary of three: the gradient of the expected reward under the weights of now."""
    logits, old, rewards = (
        tensor([0.2, -1.0, 0.5]).requires_grad_(),
        tensor([0.7, 0.2, 0.1]),
        tensor([1, 0, -2]),
    )
    logprobs = logits.log_softmax(0)
    loss, _, _ = reinforce(logprobs[:, None], old.log()[:, None], rewards, torch.ones(3, 1).bool())
    (found,) = torch.autograd.grad((old * loss[:, 0]).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(logprobs.exp() * rewards).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("coef", [1.0, 0.5])
def test_negative_log_likelihood(coef: float) -> None:
    loss = negative_log_likelihood(tensor(LOGPROBS), mask(), coef=coef)
    for row, column in cells():
        assert loss[row, column] == (-coef * LOGPROBS[row][column] if column in tokens(row) else 0.0)


@pytest.mark.parametrize("clip", [0.2, 1.0])
def test_value_clip(clip: float) -> None:
    old = tensor(PER_TOKEN) + 0.1
    loss, held = value_clip(tensor(VALUES), old, tensor(LOGPROBS), mask(), clip=clip)
    for row, column in cells():
        value, before, target = VALUES[row][column], PER_TOKEN[row][column] + 0.1, LOGPROBS[row][column]
        plain = (value - target) ** 2
        clipped = (min(max(value, before - clip), before + clip) - target) ** 2
        counts = column in tokens(row)
        expected = 0.5 * max(plain, clipped) if counts else 0.0
        assert loss[row, column].item() == pytest.approx(expected, abs=1e-12)
        assert held[row, column].item() == float(counts and clipped > plain)
    assert 0 < held.sum() < mask().sum()


def test_reverse_kl() -> None:
    loss, kl, _ = reverse_kl(*GIVEN, tensor(REF), mask())
    for row, column in cells():
        k1 = OLD[row][column] - REF[row][column] if column in tokens(row) else 0.0
        assert kl[row, column].item() == pytest.approx(k1, abs=1e-12)
        assert loss[row, column].item() == pytest.approx(ratio_at(row, column) * k1, abs=1e-12)


def test_the_expected_gradient_of_reverse_kl_is_that_of_the_divergence() -> None:
    """Exactly, over all tokens of a vocabulary of three that the student samples from."""
    logits, teacher = tensor([0.2, -1.0, 0.5]).requires_grad_(), tensor([0.7, 0.2, 0.1])
    logprobs = logits.log_softmax(0)
    student = logprobs.detach()
    loss, _, _ = reverse_kl(logprobs[None], student[None], teacher.log()[None], torch.ones(1, 3).bool())
    (found,) = torch.autograd.grad((student.exp() * loss[0]).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher.log())).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


FAR: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "ppo_clip": ppo_clip,
    "ppo_clip, dual": functools.partial(ppo_clip, dual_clip=3.0),
    "reinforce": reinforce,
    "cispo": cispo,
    "ppo_clip, importance": lambda x, y, a, m: ppo_clip(x, x.detach(), a, m, rollout_logprobs=y),
    "ppo_clip, k3": lambda x, y, a, m: ppo_clip(x, x.detach(), 0 * a, m, y, kl_coef=1.0),
    "reinforce, k3": lambda x, y, a, m: reinforce(x, x.detach(), 0 * a, m, y, kl_coef=1.0),
    "reverse_kl": lambda x, y, a, m: reverse_kl(x, y, y - a[:, None], m),
    "gspo": gspo,
}


@pytest.mark.parametrize("loss", FAR.values(), ids=list(FAR))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [89.0, -89.0, 1e30])
def test_log_probs_that_are_far_apart_give_finite_numbers(
    loss: Callable[..., tuple[Tensor, ...]], advantage: float, difference: float
) -> None:
    """In float32, where e^89 is infinite, and 0 times its slope no number."""
    leaf = torch.full((1, 1), -1.0, requires_grad=True)
    given = (torch.full((1, 1), -1.0 - difference), torch.tensor([advantage]), torch.ones(1, 1).bool())
    outputs = loss(leaf, *given)
    (gradient,) = torch.autograd.grad(outputs[0].sum(), leaf)
    assert all(output.isfinite().all() for output in (*outputs, gradient))


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "reverse_kl", "gspo"])
def test_a_token_whose_ratio_is_bounded_has_no_gradient_and_is_counted(name: str) -> None:
    """A ratio of e^20.5 for a bad token, which nothing else holds back; at e^19.5 it is as it was."""
    for difference, held in ((20.5, 1.0), (19.5, 0.0)):
        leaf = tensor([[-1.0]]).requires_grad_()
        given = (tensor([[-1.0 - difference]]), tensor([-1.0]), torch.ones(1, 1).bool())
        loss, *_, clipped = FAR[name](leaf, *given)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert clipped.sum().item() == held and bool(gradient.any()) == (not held)
        assert abs(loss.item()) == pytest.approx(math.exp(min(difference, 20)))


def test_a_penalty_whose_difference_is_bounded_is_counted_where_it_is_one() -> None:
    leaf, ref = tensor([[-30.0]]).requires_grad_(), tensor([[-1.0]])
    given = (leaf.detach(), tensor([0.0]), torch.ones(1, 1).bool(), ref)
    for function in (ppo_clip, reinforce):
        for options, counted in (({"kl_coef": 0.1}, 1), ({"kl_coef": 0.1, "kl": "k2"}, 0), ({}, 0)):
            _, kl, held = function(leaf, *given, **options)  # type: ignore[arg-type]
            assert held.item() == counted
            d = 29.0 if options.get("kl") else 20.0
            assert kl.item() == pytest.approx(d**2 / 2 if options.get("kl") else math.exp(d) - d - 1)
