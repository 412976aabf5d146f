"""Gradients of every loss: by finite differences, and none of what stands outside the mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from hflow.ops.distillation import reverse_kl
from hflow.ops.losses import cispo, negative_log_likelihood, ppo_clip, reinforce
from hflow.ops.preferences import dpo
from hflow.ops.sequence_losses import gspo
from hflow.ops.values import value_clip
from tests.ops.examples import LOGPROBS, OLD, PER_ROW, PER_TOKEN, REF, ROLLOUT, VALUES, mask, tensor

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
PAIRS = (2, 2, 5)
INPUTS = {"old": OLD, "ref": REF, "rollout": ROLLOUT, "per_token": PER_TOKEN, "other": VALUES}

# x is what the train node computes; the rest is data. Each gives its loss, of any shape.
LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda x, y: ppo_clip(x, y["old"], tensor(PER_ROW), mask())[0],
    "ppo_clip, everything on": lambda x, y: ppo_clip(
        x,
        y["old"],
        y["per_token"],
        mask(),
        y["ref"],
        y["rollout"],
        y["other"],
        clip_high=0.3,
        dual_clip=2.5,
        kl_coef=0.3,
        entropy_coef=0.1,
    )[0],
    "ppo_clip, k1": lambda x, y: ppo_clip(
        x, y["old"], y["per_token"], mask(), y["ref"], kl_coef=0.3, kl="k1"
    )[0],
    "reinforce": lambda x, y: reinforce(x, y["old"], y["per_token"], mask())[0],
    "reinforce, k2": lambda x, y: reinforce(
        x, y["old"], tensor(PER_ROW), mask(), y["ref"], kl_coef=0.3, kl="k2"
    )[0],
    "negative_log_likelihood": lambda x, y: negative_log_likelihood(x, mask(), coef=0.5),
    "value_clip": lambda x, y: value_clip(x, y["other"], y["per_token"], mask(), clip=0.5)[0],
    "gspo": lambda x, y: gspo(x, y["old"], tensor(PER_ROW), mask(), clip=0.3, clip_high=0.5)[0],
    "dpo": lambda x, y: dpo(
        x.reshape(PAIRS), y["ref"].reshape(PAIRS), mask().reshape(PAIRS), label_smoothing=0.1, nll_coef=0.3
    )[0],
    "reverse_kl": lambda x, y: reverse_kl(x, y["old"], y["ref"], mask())[0],
}
CISPO: Loss = lambda x, y: cispo(x, y["old"], y["per_token"], mask(), clip=0.3, clip_high=0.5)[0]  # noqa: E731
by_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))


def inputs() -> dict[str, Tensor]:
    return {name: tensor(values) for name, values in INPUTS.items()}


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return found


def differences(loss: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of the summed loss: exact to about step^2 and 1e-16 / step, so to 1e-9."""
    found = torch.zeros_like(at)
    for i in range(at.numel()):
        change = torch.zeros_like(at)
        change.view(-1)[i] = step
        found.view(-1)[i] = (loss(at + change).sum() - loss(at - change).sum()) / (2 * step)
    return found


@by_loss
def test_gradients_are_finite_differences(loss: Loss) -> None:
    given, at = inputs(), tensor(LOGPROBS)
    found = gradient(lambda x: loss(x, given), at)
    assert torch.allclose(found, differences(lambda x: loss(x, given), at), rtol=1e-7, atol=1e-7)
    assert found[mask()].any() and not found[~mask()].any()


def test_the_gradient_of_cispo_is_that_of_weighted_log_probs() -> None:
    """Its weights have no gradient: differences are taken of the surrogate with the weights held fast."""
    given, at = inputs(), tensor(LOGPROBS)
    weights = (at - given["old"]).exp().clamp(0.7, 1.5)

    def surrogate(x: Tensor) -> Tensor:
        return (-weights * given["per_token"] * x)[mask()]

    found = gradient(lambda x: CISPO(x, given), at)
    assert torch.allclose(found, differences(surrogate, at), rtol=1e-7, atol=1e-7)


def test_the_entropy_bonus_has_a_gradient() -> None:
    def loss(entropy: Tensor) -> Tensor:
        given = (tensor(LOGPROBS), tensor(OLD), tensor(PER_ROW), mask())
        return ppo_clip(*given, entropy=entropy, entropy_coef=0.25)[0]

    assert torch.equal(gradient(loss, tensor(VALUES)), -0.25 * mask().double())


@pytest.mark.parametrize("loss", [*LOSSES.values(), CISPO], ids=[*LOSSES, "cispo"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e300])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(loss: Loss, junk: float) -> None:
    clean = {name: values.masked_fill(~mask(), 0) for name, values in inputs().items()}
    dirty = {name: values.masked_fill(~mask(), junk) for name, values in inputs().items()}
    x = tensor(LOGPROBS)
    for function in (lambda x, y: loss(x, y).detach(), lambda x, y: gradient(lambda z: loss(z, y), x)):
        expected = function(x.masked_fill(~mask(), 0), clean)
        assert torch.equal(function(x.masked_fill(~mask(), junk), dirty), expected)
        assert expected.any()


@pytest.mark.parametrize("loss", [*LOSSES.values(), CISPO], ids=[*LOSSES, "cispo"])
def test_an_empty_response_costs_nothing(loss: Loss) -> None:
    """The last row has no token. In a pair it is not preferred, nor is the other to it."""
    each = loss(tensor(LOGPROBS), inputs())
    assert each.isfinite().all() and not each[-1].any()
