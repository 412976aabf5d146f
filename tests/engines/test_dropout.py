"""Dropout of adapters: masks against scalar arithmetic, gradients against PEFT's model, and chance."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.megatron.dropout import column_draws, dropped_product, kept, numbered, token_draws
from hflow.runtime.rows import Rows
from tests.engines.models import Folders
from tests.engines.processes import Pool
from tests.engines.test_adapter import Matrices, PeftReference, matrices, near, plain, train_on_rank
from tests.engines.test_train import MESHES, ROWS, rollout

DROPOUT = 0.3
ALL = Adapter(4, 6.0, ADAPTER_TARGETS, DROPOUT)
SEED, STEP = 11, 3  # of `make_call`
LAYOUTS: dict[str, tuple[Mesh, Strategy]] = {name: (mesh, PLAIN) for name, mesh in MESHES.items()} | {
    "zero1": (MESHES["dp2"], Strategy(zero=1)),
    "tp2 sp recompute": (MESHES["tp2"], Strategy(sp=True, recompute="full")),
    "pp2 recompute": (MESHES["pp2"], Strategy(recompute="full")),
    "cp2": (Mesh.of((0, 1), cp=2), PLAIN),
    "cp2 tp2 sp": (Mesh.of((0, 1, 2, 3), cp=2, tp=2), Strategy(sp=True)),
}
WRAP = np.errstate(over="ignore")


def split_mix(x: Any) -> Any:
    """Steele et al., OOPSLA 2014, of unsigned numbers of 64 bits."""
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def short_mix(x: Any) -> Any:
    """lowbias32, of unsigned numbers of 32 bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def number(*parts: object) -> Any:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.frombuffer(digest[:8], np.uint64)[0]


def numbers(count: int) -> Any:
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@WRAP
def mask_of(tokens: list[int], prompt: int, row: int, seed: Any, matrix: Any, columns: int) -> Any:
    """Which inputs of a matrix stay, of one row, as `hflow.runtime.engines.megatron.dropout` says."""
    places = numbers(len(tokens))
    of_prompt = split_mix(np.array(tokens[:prompt], np.uint64) + places[:prompt]).sum(dtype=np.uint64)
    owner = np.where(np.arange(len(tokens)) < prompt, of_prompt, split_mix(row))
    draws = split_mix(split_mix(owner + seed) + places).astype(np.uint32)
    own = split_mix(matrix + numbers(columns)).astype(np.uint32)
    chance = (short_mix(draws[:, None] + own) & np.uint32(0x7FFFFFFF)) / 2**31
    return torch.from_numpy(chance >= DROPOUT)


class Dropped(torch.nn.Module):
    """In the place of PEFT's dropout before A of one matrix."""

    def __init__(self, reference: DropoutReference, matrix: Any):
        super().__init__()
        self.at, self.matrix = (reference,), matrix  # a tuple: no submodule of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, prompt, row = self.at[0].now
        mask = mask_of(tokens, prompt, row, number(SEED, "actor_train", STEP), self.matrix, x.shape[-1])
        return x * mask / (1 - DROPOUT)


class DropoutReference(PeftReference):
    """PPO by the book on PEFT's model, whose rows are dropped from one after the other."""

    now: tuple[list[int], int, int]

    def __init__(self, folder: str, values: Matrices):
        super().__init__(folder, ALL, values)
        for name, module in list(self.model.named_modules()):
            if name.endswith("lora_dropout"):
                _, layer, _, target = plain(name).rsplit(".", 1)[0].rsplit(".", 3)
                module["default"] = Dropped(self, number(layer, target))  # type: ignore[index]

    def row(self, data: dict[str, Rows], row: int) -> tuple[torch.Tensor, ...]:
        tokens = data["tokens"].slice(row, row + 1).values.tolist()
        self.now = tokens, len(tokens) - len(data["mask"].slice(row, row + 1).values), row
        return super().row(data, row)


@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_gradients_equal_those_of_pefts_model_with_the_same_masks(
    pool: Pool, folders: Folders, layout: str, variant: str
) -> None:
    folder, (mesh, strategy) = folders.of(variant, True), LAYOUTS[layout]
    values, data = matrices(folder, ALL), rollout(folder)
    reference = DropoutReference(folder, values)
    reference.gradients(data, list(range(ROWS)))
    named: dict[str, Any] = {plain(n): p.grad for n, p in reference.model.named_parameters()}
    arguments = folder, mesh, ALL, values, data, strategy
    found = pool.run(len(mesh.devices), train_on_rank, *arguments)
    for name, (box, gradient, _) in (pair for part in found for pair in part.items()):
        if gradient is not None and strategy.zero == 0:  # else it is that of a part of the ranks
            near(gradient, named[name][tuple(slice(a, b) for a, b in box)], 1e-6)
    undropped = PeftReference(folder, replace(ALL, dropout=0.0), values)
    undropped.gradients(data, list(range(ROWS)))
    other: dict[str, Any] = {plain(n): p.grad for n, p in undropped.model.named_parameters()}
    assert all((named[name] - other[name]).abs().max() > 1e-4 for name in values), "nothing was dropped"


@pytest.mark.slow
def test_every_layout_makes_the_same_update(pool: Pool, folders: Folders) -> None:
    folder = folders.of("llama", True)
    values, data = matrices(folder, ALL), rollout(folder)
    (whole,) = pool.run(1, train_on_rank, folder, MESHES["one"], ALL, values, data, PLAIN)
    for layout in ("zero1", "tp2 sp recompute", "cp2 tp2 sp"):
        mesh, strategy = LAYOUTS[layout]
        for part in pool.run(len(mesh.devices), train_on_rank, folder, mesh, ALL, values, data, strategy):
            for name, (box, _, weight) in part.items():
                where = tuple(slice(a, b) for a, b in box)
                near(weight, torch.from_numpy(whole[name][2])[where], 1e-6)


class Drawn:
    """Masks of 96 rows of 60 tokens before two matrices of 512 columns, in two updates."""

    rows, longest, columns = 96, 60, 512

    @cached_property
    def masks(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 900, (self.rows, self.longest), generator=generator)
        prompts, rows = torch.full((self.rows,), 20), torch.arange(self.rows)
        found = dict[str, torch.Tensor]()
        for update in (0, 1):
            draws = token_draws(tokens, prompts, rows, numbered(1, "train", update)).flatten()
            for matrix in ("q_proj", "k_proj"):
                own = column_draws(numbered(0, matrix), 0, self.columns, draws.device)
                found[f"{matrix}, update {update}"] = kept(draws, own, DROPOUT)
        return found


DRAWN = Drawn()


def test_as_many_are_dropped_as_is_asked_for() -> None:
    """In all, of each token and in each column: sums of independent draws, within 5 standard deviations."""
    for mask in DRAWN.masks.values():
        shares = mask.float().mean().view(1), mask.float().mean(0), mask.float().mean(1)
        for share, count in zip(shares, (mask.numel(), len(mask), DRAWN.columns)):
            sigma = (DROPOUT * (1 - DROPOUT) / count) ** 0.5
            assert (share - (1 - DROPOUT)).abs().max() < 5 * sigma
            if len(share) > 1:  # neither more even than chance, nor less
                assert float(share.std()) == pytest.approx(sigma, rel=5 * (2 / len(share)) ** 0.5)


def test_what_is_dropped_of_one_thing_says_nothing_of_another() -> None:
    """Of matrices, updates, tokens that follow each other, rows and columns beside each other."""
    apart = {name: mask.float() - (1 - DROPOUT) for name, mask in DRAWN.masks.items()}
    pairs = list(combinations(apart.values(), 2))
    one = next(iter(apart.values()))
    by_row = one.view(DRAWN.rows, DRAWN.longest, -1)
    pairs += [(one[:-1], one[1:]), (one[:, :-1], one[:, 1:]), (by_row[:-1], by_row[1:])]
    for first, second in pairs:
        correlation = (first * second).mean() / (DROPOUT * (1 - DROPOUT))
        assert abs(float(correlation)) < 5 * first.numel() ** -0.5


def test_rows_of_one_prompt_share_its_draws_alone() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9]]).repeat(3, 1)
    prompts, rows = torch.tensor([3, 3, 2]), torch.tensor([0, 9, 17])
    one, same, other = token_draws(tokens, prompts, rows, 5)
    assert torch.equal(one[:3], same[:3]) and not (one[3:] == same[3:]).any()
    assert not (one == other).any(), "another prompt, though it begins alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learns", [True, False])
def test_the_product_is_that_of_what_stays(
    dtype: torch.dtype, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by chunks of 7 tokens, and of x alone; against autograd on the masked input in float64."""
    monkeypatch.setattr("hflow.runtime.engines.megatron.dropout.CHUNK_ELEMENTS", 7 * 48)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 1, 48, generator=generator).to(dtype).requires_grad_(learns)
    weight = torch.randn(5, 48, generator=generator).to(dtype).requires_grad_()
    draws = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    columns = column_draws(3, 0, 48, x.device)
    found = dropped_product(x, weight, draws, columns, DROPOUT)
    upstream = torch.randn(found.shape, generator=generator).to(dtype)
    found.backward(upstream)
    exact, own = (t.detach().double().requires_grad_() for t in (x, weight))
    mask = kept(draws, columns, DROPOUT)[:, None]
    wanted = torch.nn.functional.linear(exact * mask / (1 - DROPOUT), own)
    wanted.backward(upstream.double())
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.15, 2e-2)
    for mine, theirs in ((found, wanted), (weight.grad, own.grad), (x.grad, exact.grad)):
        if mine is not None:
            torch.testing.assert_close(mine.double(), theirs, atol=atol, rtol=rtol)
    assert (x.grad is None) != learns
