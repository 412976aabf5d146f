"""Which updates are not made: those whose gradient is rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hflow.graph.ir import Function
from hflow.ops.distillation import reverse_kl
from hflow.ops.losses import cispo, negative_log_likelihood, ppo_clip, reinforce
from hflow.ops.pairwise import bradley_terry
from hflow.ops.preferences import dpo
from hflow.ops.sequence_losses import gspo
from hflow.ops.values import value_clip
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.learning_signal import ROUNDING, carries_signal, leave_out_rounding
from hflow.runtime.rows import Rows
from tests.engines.models import ADAM, Folders, load_hf, make_call, make_engine, share, train_node
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, ROWS, response_log_probs, rollout

SIZE = (4, 6)
MASK = torch.ones(SIZE, dtype=torch.bool)
LOGPROBS = -torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) - 1
NEAR, FAR = LOGPROBS + 1e-6, LOGPROBS + 1e-3
EQUAL, BETTER = torch.zeros(4), torch.tensor([0.0, 0.0, 1e-6, 0.0])
PAIRS = (2, 2, 6)
LONG = torch.full((2, 2000), -1.0)
LONG_MASK = torch.stack([torch.ones(2000), torch.arange(2000) < 2]).bool()

# Of the loss of log-probs x: whether there is something to learn from, in f32.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "equal rewards": (lambda x: ppo_clip(x, LOGPROBS, EQUAL, MASK)[0], False),
    "equal rewards, at the reference": (
        lambda x: ppo_clip(x, LOGPROBS, EQUAL, MASK, NEAR, kl_coef=0.1)[0], False),
    "equal rewards, away from the reference": (
        lambda x: ppo_clip(x, LOGPROBS, EQUAL, MASK, FAR, kl_coef=1e-9)[0], True),
    "equal rewards, k2": (lambda x: ppo_clip(x, LOGPROBS, EQUAL, MASK, NEAR, kl_coef=3.0, kl="k2")[0], False),
    "one reward": (lambda x: ppo_clip(x, LOGPROBS, BETTER, MASK, NEAR, kl_coef=0.001)[0], True),
    "reinforce": (lambda x: reinforce(x, LOGPROBS, EQUAL, MASK, NEAR, kl_coef=0.1)[0], False),
    "reinforce, one reward": (lambda x: reinforce(x, LOGPROBS, BETTER, MASK)[0], True),
    "cispo": (lambda x: cispo(x, LOGPROBS, EQUAL, MASK)[0], False),
    "cispo, one reward": (lambda x: cispo(x, LOGPROBS, BETTER, MASK)[0], True),
    "gspo": (lambda x: gspo(x, LOGPROBS, EQUAL, MASK)[0], False),
    "gspo, one reward": (lambda x: gspo(x, LOGPROBS, BETTER, MASK)[0], True),
    "supervised": (lambda x: negative_log_likelihood(x, MASK), True),
    "nothing in the mask": (lambda x: negative_log_likelihood(x, ~MASK), False),
    "distillation": (lambda x: reverse_kl(x, LOGPROBS, FAR, MASK)[0], True),
    "preference": (
        lambda x: dpo(x.reshape(PAIRS), NEAR.reshape(PAIRS), MASK.reshape(PAIRS))[0], True),
    "equal scores": (
        lambda x: dpo(x.reshape(PAIRS), FAR.reshape(PAIRS), MASK.reshape(PAIRS), EQUAL.reshape(2, 2))[0],
        False),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_whether_a_loss_carries_signal(name: str) -> None:
    loss, expected = CASES[name]
    x = LOGPROBS.clone().requires_grad_()
    for scale in (1.0, 1e-12, 1e12):  # of the loss: what counts is where it is flat
        total = loss(x).sum() * scale
        assert bool(carries_signal(total, {"logprobs": x}, torch.float32)) == expected
        total.backward()  # its graph is still there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_rounding_are_left_out_of_the_gradient(dtype: torch.dtype) -> None:
    """Of four rows, one has a reward, another is away from the reference; those between are rounding."""
    reference = torch.where(torch.arange(4)[:, None] == 3, LOGPROBS + 1e-4, NEAR)
    gradients: list[Tensor] = []
    for leaves_out in (False, True):
        x = LOGPROBS.clone().requires_grad_()
        loss = ppo_clip(x, LOGPROBS, BETTER, MASK, reference, kl_coef=0.01)[0].sum()
        if leaves_out:
            assert bool(leave_out_rounding(loss, {"logprobs": x}, dtype)) == (dtype == torch.float32)
        loss.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    plain, left = gradients
    assert (plain[:2] != 0).all() and (left[:2] == 0).all()
    assert torch.equal(left[2:], plain[2:])


def test_a_slope_that_is_no_number_is_not_hidden() -> None:
    x = LOGPROBS.clone().requires_grad_()
    loss = (x * torch.where(torch.arange(6) == 1, torch.nan, 1.0)).sum()
    leave_out_rounding(loss, {"logprobs": x}, torch.float32)
    loss.backward()
    assert x.grad is not None and x.grad[:, 1].isnan().all()


def test_entropy_always_teaches() -> None:
    x, entropy = (LOGPROBS.clone().requires_grad_() for _ in range(2))
    loss = ppo_clip(x, LOGPROBS, EQUAL, MASK, entropy=entropy, entropy_coef=1e-6)[0].sum()
    assert carries_signal(loss, {"logprobs": x, "entropy": entropy}, torch.float32)


def test_the_rounding_of_values_is_relative_to_them() -> None:
    """Rewards in small units are no rounding."""
    for scale, expected in ((1e-9, True), (1e9, True)):
        x = (LOGPROBS * scale).requires_grad_()
        loss = value_clip(x, x.detach(), x.detach() * 1.001, MASK)[0].sum()
        assert bool(carries_signal(loss, {"values": x}, torch.float32)) == expected
        loss = value_clip(x, x.detach(), x.detach() * (1 + 1e-6), MASK)[0].sum()
        assert not carries_signal(loss, {"values": x}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [0.0, 10.0, -1000.0])
def test_values_and_scores_teach_on_every_level(dtype: torch.dtype, level: float) -> None:
    """A critic whose returns are 1 around its values, and a reward model that cannot tell a pair apart."""
    x = torch.full(SIZE, level, requires_grad=True)
    loss = value_clip(x, x.detach(), x.detach() + torch.linspace(-1, 1, 6), MASK)[0].sum()
    assert carries_signal(loss, {"values": x}, dtype)
    score = torch.full((4, 2), level, requires_grad=True)
    loss = bradley_terry(score)[0].sum()
    assert carries_signal(loss, {"score": score}, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_preference_between_responses_of_unequal_length_is_no_rounding(dtype: torch.dtype) -> None:
    """2000 errors that all had the same sign would change the slope by more than itself, in bf16."""
    x = LONG.clone().requires_grad_()
    loss = dpo(x[None], LONG[None], LONG_MASK[None])[0].sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (summed,) = torch.autograd.grad(slope.sum(), x, retain_graph=True)
    assert (slope.abs() < ROUNDING[torch.bfloat16] * summed.abs()).all(1)[0]
    assert carries_signal(loss, {"logprobs": x}, dtype)


class Once(torch.autograd.Function):
    """x squared, without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_square: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * to_square


def test_a_loss_that_cannot_be_differentiated_twice_is_taken_to_be_linear() -> None:
    for start, expected in ((0.0, False), (1e-9, True)):
        x = torch.full(SIZE, start, requires_grad=True)
        loss: Any = Once.apply(x)
        assert bool(carries_signal(loss.sum(), {"logprobs": x}, torch.float32)) == expected


def test_a_curvature_that_is_not_finite_hides_no_slope() -> None:
    x = torch.zeros(SIZE, requires_grad=True)
    loss = (x + x.abs() ** 1.5).sum()
    assert carries_signal(loss, {"logprobs": x}, torch.float32)


def nothing_to_learn(folder: str, row_with_reward: int | None, to_reference: float) -> dict[str, Rows]:
    """A rollout of the model's own log-probs, up to rounding; all advantages are 0, but those of one row."""
    data, model = dict(rollout(folder)), load_hf(folder)
    lengths = data["mask"].lengths
    assert lengths is not None
    own = [
        response_log_probs(model, data["tokens"].slice(row, row + 1).values.long(), int(n), 1.0)[0].detach()
        for row, n in enumerate(lengths)
    ]
    data["old_logprobs"] = Rows(torch.cat(own), lengths)
    data["ref_logprobs"] = Rows(torch.cat(own) + to_reference, lengths)
    advantages = torch.zeros(ROWS)
    if row_with_reward is not None:
        advantages[row_with_reward] = 1.0
    data["advantages"] = Rows(advantages)
    return data


def train_on_rank(rank: int, new_group: NewGroup, folder: str, layout: str, data: dict[str, Rows]) -> Any:
    """Metrics, and whether this rank's weights changed."""
    mesh = MESHES[layout]
    engine = make_engine(rank, new_group, folder, mesh, ADAM)
    before = [p.detach().clone() for p in engine.model.parameters()]
    node = train_node(ROWS, ROWS // 2, {"kl_coef": 0.5, "warmup_steps": 4})
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    metrics = engine.run(make_call(engine, rank, node, ROWS, 2, step=0), inputs).metrics
    return dict(metrics), not all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2", "pp2dp2"])
def test_an_update_of_rounding_is_not_made_and_counted(pool: Pool, folders: Folders, layout: str) -> None:
    """Two updates: row 1 is in the second. All ranks make it, though only one has seen the reward; the
    learning rate goes on as if both had been made."""
    folder, world = folders.of("qwen2", False), len(MESHES[layout].devices)
    for row, reference, skipped in ((None, 1e-6, 2.0), (1, 1e-6, 1.0), (None, 1e-3, 0.0)):
        data = nothing_to_learn(folder, row, reference)
        results = pool.run(world, train_on_rank, folder, layout, data)
        (found,) = [metrics for metrics, _ in results if "lr" in metrics]
        assert found["skipped_updates"] == (skipped, 1.0)
        assert found["lr"] == (pytest.approx(ADAM["lr"] * (0.25 + 0.5)), 2.0)
        assert {changed for _, changed in results} == {skipped < 2}


def test_a_users_loss_needs_no_second_derivative(pool: Pool, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("""
import torch

class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return -gradient

def loss(logprobs, mask):
    return Once.apply(logprobs) * logprobs.detach().abs()
""")
    signature = "logprobs: f32[rows, resp~]<trained>, mask: bool[rows, resp~] -> loss: f32[rows, resp~]"
    function, folder = Function(f"{tmp_path}/losses.py:loss", signature), folders.of("llama", False)
    (metrics,) = pool.run(1, user_loss_on_rank, folder, function)
    assert metrics["skipped_updates"] == (0.0, 1.0) and metrics["grad_norm"][0] > 0


def user_loss_on_rank(rank: int, new_group: NewGroup, folder: str, function: Function) -> Any:
    engine = make_engine(rank, new_group, folder, MESHES["one"], ADAM)
    call = make_call(engine, rank, train_node(ROWS, ROWS, {}, function), ROWS, 2)
    return dict(engine.run(call, rollout(folder)).metrics)
