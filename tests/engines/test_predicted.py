"""Log-probs from hidden states by tiles of logits, against plain PyTorch: linear, log_softmax, autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hflow.plan import logits
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.predicted import predicted
from hflow.runtime.rows import Rows
from tests.engines.memory import torch_operations
from tests.engines.models import (
    ADAM,
    Folders,
    make_call,
    make_engine,
    read_training,
    score_node,
    share,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, PPO, ROWS, compare, reference, rollout

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """`side`: of a tile. `cap`: of logits. `kept`: the size of sets, 0 for none. Gradients begin at `before`,
    as after another micro-batch. `kernels`: else torch's operations."""

    tokens: int = 23
    vocab: int = 36
    hidden: int = 7
    side: int = 5
    kept: int = 0
    entropy: bool = True
    temperature: float = 0.6
    dtype: str = "f32"
    frozen: bool = False
    before: float = 0.25
    cap: float | None = None
    kernels: bool = True

    def data(self) -> tuple[Tensor, ...]:
        """Hidden states and matrix in the dtype, targets, kept sets, and weights of both results."""
        generator = torch.Generator().manual_seed(self.tokens + 100 * self.vocab)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator).to(DTYPES[self.dtype])
        weight = torch.randn(self.vocab, self.hidden, generator=generator).to(DTYPES[self.dtype])
        every = torch.stack([torch.randperm(self.vocab, generator=generator) for _ in range(self.tokens)])
        kept, targets = every[:, : self.kept].clone(), every[:, 0].clone()
        for row in range(self.tokens):
            kept[row, 1 + row % max(1, self.kept) :] = -1
        kept[-1:] = -1  # an empty set
        return hidden, weight, targets, kept, *torch.randn(2, self.tokens, generator=generator)


@contextmanager
def tiles_of(side: int) -> Iterator[None]:
    with patch.object(logits, "LOGITS_BYTES", logits.COPIES_BYTES * side**2):
        assert logits.tile_side() == side
        yield


def on_rank(rank: int, new_group: NewGroup, case: Case) -> Any:
    """Both results, the gradient of the hidden states, and that of this rank's rows of the matrix."""
    group = new_group(tuple(range(dist.get_world_size())))
    hidden, weight, targets, kept, a, b = case.data()
    hidden = hidden.requires_grad_()
    own: Any = weight.chunk(group.size())[rank].clone().requires_grad_(not case.frozen)
    own.main_grad = torch.full(own.shape, case.before)
    nothing: Any = None  # that no layer of Megatron's is asked shows that all is by tiles
    with tiles_of(case.side), nullcontext() if case.kernels else torch_operations():
        matrix = OutputMatrix(nothing, own, group, case.cap)
        sets = kept if case.kept else None
        found = predicted(hidden, matrix, targets, case.temperature, case.entropy, sets)
        (found[0] @ a + (found[1] @ b if case.entropy else 0)).backward()
    assert own.grad is None and hidden.grad is not None
    values = [x.detach().numpy() for x in found]
    return (*values, hidden.grad.float().numpy(), own.main_grad.numpy())


def expected_of(case: Case) -> tuple[Tensor, ...]:
    """As `on_rank`, over the whole vocabulary: f32 in float64; the logits of bf16 are rounded to bf16."""
    hidden, weight, targets, kept, a, b = case.data()
    exact = torch.float64 if case.dtype == "f32" else torch.bfloat16
    hidden, weight = hidden.to(exact).requires_grad_(), weight.to(exact).requires_grad_()
    z = torch.nn.functional.linear(hidden, weight).double()
    z = (z if case.cap is None else case.cap * torch.tanh(z / case.cap)) / case.temperature
    sampled = torch.ones(case.tokens, dtype=torch.bool)
    if case.kept:
        inside = (kept[..., None] == torch.arange(case.vocab)).any(1)
        sampled = inside.any(1)
        z = z.masked_fill(~inside & sampled[:, None], -torch.inf)
    log_p = z.log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None])[:, 0].where(sampled, 0.0)
    # -inf times 0 is no number, and its gradient is none either
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1).where(sampled, 0.0)
    (chosen @ a.double() + (entropy @ b.double() if case.entropy else 0)).backward()
    assert hidden.grad is not None and weight.grad is not None
    to_weight = torch.zeros_like(weight) if case.frozen else weight.grad
    shown = entropy.detach() if case.entropy else torch.zeros_like(entropy)
    return chosen.detach(), shown, hidden.grad, to_weight + case.before


def check(pool: Pool, world: int, case: Case) -> None:
    results = pool.run(world, on_rank, case)
    *shared, to_weight = expected_of(case)
    # float32: sums of up to 36 terms of order 10. bf16: a logit of up to 10, rounded the other way, is 1/16
    # away, and a gradient is a sum of terms that are rounded to 2^-8 of themselves.
    atol, rtol = (2e-5, 1e-5) if case.dtype == "f32" else (0.1, 2**-6)
    for rank, (*mine, own) in enumerate(results):
        for value, theirs in zip(mine, shared, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), theirs.float(), atol=atol, rtol=rtol)
        rows = to_weight.chunk(world)[rank].float()
        torch.testing.assert_close(torch.from_numpy(own), rows, atol=atol, rtol=rtol)


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kept", [0, 6])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("side", [1, 5, 16])
@pytest.mark.parametrize("kernels", [True, False])
def test_values_and_gradients(
    pool: Pool, world: int, dtype: str, kept: int, entropy: bool, side: int, kernels: bool
) -> None:
    check(pool, world, Case(dtype=dtype, kept=kept, entropy=entropy, side=side, kernels=kernels))


@pytest.mark.parametrize("kept", [0, 6])
@pytest.mark.parametrize("entropy", [True, False])
def test_capped_logits(pool: Pool, kept: int, entropy: bool) -> None:
    """Gradients go through the cap, which bends logits of up to 10."""
    check(pool, 2, Case(cap=3.0, kept=kept, entropy=entropy))


def test_a_frozen_matrix_has_no_gradient(pool: Pool) -> None:
    for kept in (0, 6):
        check(pool, 2, Case(frozen=True, kept=kept))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 12), st.integers(1, 9), st.data())
def test_any_size_of_tiles_gives_the_same(
    pool: Pool, tokens: int, half_vocab: int, hidden: int, side: int, data: st.DataObject
) -> None:
    """Of any size, whether tiles divide it or not; 2 tokens by 2 * side**2 words, at least, do not fit."""
    tokens, vocab = tokens + 1, 2 * (half_vocab + side**2)
    kept = data.draw(st.sampled_from([0, 1, vocab // 2]))
    temperature = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    kernels = data.draw(st.booleans())
    check(pool, 1, Case(tokens, vocab, hidden, side, kept, temperature=temperature, kernels=kernels))


def large_logits_on_rank(rank: int, new_group: NewGroup) -> Any:
    """exp of logits of 1e4 overflows unless the greatest is taken out, part by part and rank by rank."""
    group = new_group((0, 1))
    hidden, weight, targets, *_ = Case().data()
    own: Any = (1e4 * weight).chunk(2)[rank]
    nothing: Any = None
    with tiles_of(5):
        log_p, entropy = predicted(hidden, OutputMatrix(nothing, own, group), targets)
    return log_p.numpy(), entropy.numpy()


def test_large_logits_do_not_overflow(pool: Pool) -> None:
    hidden, weight, targets, *_ = Case().data()
    log_p = (hidden.double() @ (1e4 * weight).double().t()).log_softmax(-1)
    for found, entropy in pool.run(2, large_logits_on_rank):
        expected = log_p.gather(1, targets[:, None])[:, 0].float()
        # logits of up to 1e5, whose spacing in float32 is 2^-7
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=0.1, rtol=1e-5)
        assert (abs(entropy) < 0.1).all()


def trained_on_rank(
    rank: int,
    new_group: NewGroup,
    folder: str,
    layout: str,
    data: dict[str, Rows],
    options: dict[str, Any],
    strategy: Strategy,
    dtype: str,
    side: int,
    times: int,
) -> Any:
    """Metrics, (box, last gradient, weight) by HF name, and scores before, of `times` epochs of as many
    updates."""
    mesh = MESHES[layout]
    engine = make_engine(rank, new_group, folder, mesh, ADAM | options, dtype, strategy=strategy)
    node = train_node(ROWS, ROWS // times, options, epochs=times)
    call = make_call(engine, rank, node, ROWS, 2, strategy=strategy)
    inputs = {name: rows.slice(*share(mesh, rank, ROWS)) for name, rows in data.items()}
    asked = {name: inputs[name] for name in ("tokens", "mask")}
    with tiles_of(side):
        scored = engine.run(make_call(engine, rank, score_node(ROWS, 0.8), ROWS, 2), asked).outputs
        metrics = engine.run(call, inputs).metrics
    found = {name: values.values.numpy() for name, values in scored.items()}
    return dict(metrics), read_training(engine), found


OPTIONS = ADAM | PPO | {"aggregate": "token_mean", "clip_grad": 0.0, "warmup_steps": 0}


@pytest.mark.matrix
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("one", PLAIN), ("tp2", Strategy("full")), ("pp2", PLAIN), ("tp2dp2", Strategy(zero=1)),
        ("tp2pp2", Strategy("full")),
    ],
)  # fmt: skip
def test_updates_equal_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, tied: bool
) -> None:
    """Two epochs of two updates in float64, though each micro-batch is made of tiles of 5 by 5."""
    folder = folders.of("qwen2" if tied else "llama", tied)
    data, options = rollout(folder), OPTIONS
    ranks = len(MESHES[layout].devices)
    results = pool.run(ranks, trained_on_rank, folder, layout, data, options, strategy, "f32", 5, 2)
    metrics, named = reference(folder, data, options, 2, 2)
    found = [(reported, parts) for reported, parts, _ in results]
    if strategy.zero:  # no rank has whole gradients
        named = {name: (weight, weight) for name, (_, weight) in named.items()}
        found = [(r, {n: (box, w, w) for n, (box, _, w) in parts.items()}) for r, parts in found]
    # Adam divides by the root of a running mean: rounding of small gradients grows over four updates
    compare(found, metrics, named, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_scores_and_gradients_are_those_of_logits_that_are_kept(
    pool: Pool, folders: Folders, dtype: str
) -> None:
    folder = folders.of("llama", False)
    arguments = folder, "tp2", rollout(folder), OPTIONS, PLAIN, dtype
    kept = pool.run(2, trained_on_rank, *arguments, 4096, 1)
    tiled = pool.run(2, trained_on_rank, *arguments, 5, 1)
    # bf16: logits of about 5 are rounded to 2^-6, and products to 2^-8 of themselves
    scores_atol, gradient_rtol = (1e-5, 1e-5) if dtype == "f32" else (0.05, 2**-6)
    for (_, mine, scores), (_, theirs, others) in zip(tiled, kept, strict=True):
        for name, values in others.items():
            expected = torch.from_numpy(values)
            torch.testing.assert_close(torch.from_numpy(scores[name]), expected, atol=scores_atol, rtol=0)
        for name, (_, gradient, _) in theirs.items():
            expected = torch.from_numpy(gradient)
            apart = (torch.from_numpy(mine[name][1]) - expected).norm()
            assert apart <= gradient_rtol * expected.norm(), name
        assert any(gradient.any() for _, gradient, _ in theirs.values())
