"""Attention of packed rows by kernels for CPUs against that of rows alone, written out."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hflow.plan.layout import Mesh
from hflow.plan.packing import TokenBudget
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import attention
from hflow.runtime.engines.megatron.cpu_kernels import library
from hflow.runtime.engines.megatron.cpu_kernels.causal import attend_causally, is_parallel
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.pack import Pack, RowPlaces
from hflow.runtime.engines.megatron.prompt_groups import PromptGroups
from hflow.runtime.engines.megatron.schedule import run_schedule
from tests.engines.memory import kernels_for, torch_operations
from tests.engines.models import Folders, make_engine
from tests.engines.processes import Pool
from tests.engines.test_pack import RAGGED, sequences_of

pytestmark = pytest.mark.skipif(not library.compilers(), reason="there is no C++ compiler")

Rows = list[tuple[list[int], list[int]]]
ROW = st.tuples(st.lists(st.integers(3, 4), min_size=1, max_size=5), st.lists(st.integers(3, 9), max_size=30))
SIZES = st.sampled_from(((4, 2, 8), (3, 3, 24), (6, 1, 64), (64, 1, 8), (5, 5, 33)))  # heads, pairs, width
LONG: Rows = [([5 + n % 3] * 40, [7] * (9 * n)) for n in range(15)]  # many turns, and rows of all lengths


def alone(places: RowPlaces, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Each row's scores in memory; of a token that rows share what the first of them has."""
    found = torch.zeros_like(query)
    for row, length in enumerate(places.lengths.tolist()):
        at, own = places.places[row, :length], places.own[row, :length]
        keys, values = (x[at].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[at], keys) / math.sqrt(query.shape[2])
        apart = torch.arange(length)[:, None] - torch.arange(length)
        unseen = (apart < 0) | (apart >= (window or length))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), values)
        found = found.index_put((at[own],), out[own])
    return found


def made(tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, and values that are a part of more, as a layer's are."""
    heads, pairs, width = sizes
    query, key = (torch.randn(tokens, n, width).to(dtype).requires_grad_() for n in (heads, pairs))
    memory = torch.randn(tokens, pairs, 3, width).to(dtype)
    return (
        query,
        key,
        memory.view(tokens, -1)[:, -pairs * width :].unflatten(1, (pairs, width)).requires_grad_(),
    )


def check(
    rows: Rows, sizes: tuple[int, int, int], dtype: torch.dtype, window: int | None, padding: int = 0
) -> None:
    places, pack = RowPlaces.of(sequences_of(rows)), Pack.of(sequences_of(rows))
    pack = pack.padded(len(pack.tokens) + padding)
    tensors = made(len(pack.tokens), sizes, dtype)
    upstream = torch.randn(tensors[0].shape).to(dtype)
    found = attend_causally(*tensors, pack.groups, window)
    query, key, value = (x.detach().double().requires_grad_() for x in tensors)
    expected, wide = alone(places, query, key, value, window), (query, key, value)
    mine = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(expected, wide, upstream.double())
    for own, other in zip((found, *mine), (expected, *theirs), strict=True):
        assert own.dtype == dtype and own.shape == other.shape
        unit = 1e-5 if dtype == torch.float32 else 2**-6
        greatest = float(other.detach().abs().max()) if len(other) else 0.0
        torch.testing.assert_close(own.double(), other, rtol=0, atol=unit * max(1.0, greatest))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), SIZES, st.sampled_from((None, 1, 3, 20)), st.integers(0, 3))
def test_attention_and_its_gradients_are_those_of_rows_alone(
    rows: Rows, sizes: tuple[int, int, int], window: int | None, padding: int
) -> None:
    torch.manual_seed(len(rows))
    check(rows, sizes, torch.float32, window, padding)


@pytest.mark.parametrize("window", [None, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_long_rows(dtype: torch.dtype, window: int | None) -> None:
    check(LONG, (4, 2, 64), dtype, window)


def test_values_in_other_orders() -> None:
    """Dims that are not after each other are copied."""
    pack = Pack.of(sequences_of(RAGGED))
    query, key, _ = made(len(pack.tokens), (4, 2, 8), torch.float32)
    value = torch.randn(len(pack.tokens), 8, 2).transpose(1, 2)
    found = attend_causally(query, key, value, pack.groups)
    assert torch.equal(found, attend_causally(query, key, value.contiguous(), pack.groups))


def test_threads_change_nothing() -> None:
    pack, before = Pack.of(sequences_of(LONG)), torch.get_num_threads()
    tensors = made(len(pack.tokens), (4, 2, 64), torch.float32)
    upstream, found = torch.randn(tensors[0].shape), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = attend_causally(*tensors, pack.groups)
            found.append((out, *torch.autograd.grad(out, tensors, upstream)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    """Rows that are taken after one with such numbers, in the same memory, have none of them."""
    rows: Rows = [([5] * 40, [7] * 30), ([6] * 40, [7] * 3), ([8] * 9, [7] * 50)]
    pack, before = Pack.of(sequences_of(rows)), torch.get_num_threads()
    tensors = made(len(pack.tokens), (2, 1, 16), torch.float32)
    first = RowPlaces.of(sequences_of(rows)).places[0, :69]
    own = torch.zeros(len(pack.tokens), dtype=torch.bool).index_fill_(0, first, True)
    with torch.no_grad():
        for x in tensors:
            x[first[10:]] = bad
    try:
        torch.set_num_threads(1)
        out = attend_causally(*tensors, pack.groups)
        gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    finally:
        torch.set_num_threads(before)
    for found in (out, *gradients):
        assert not found[own].isfinite().all() and found[~own].isfinite().all()


def test_groups_have_every_row_after_the_first_of_its_prompt() -> None:
    """Prompts 5 6 7, 5 6 and 9, then responses without their last tokens."""
    groups = PromptGroups.of(sequences_of(RAGGED))
    expected = [[0, 3, 6, 1], [0, 3, 7, 0], [0, 3, 13, 0], [3, 2, 7, 6], [5, 1, 13, 0]]
    assert groups.rows.tolist() == expected and groups.starts.tolist() == [0, 3, 4, 5]
    assert (len(groups), groups.longest, groups.tokens) == (3, 8, 13)


def test_whole_rows_where_threads_would_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, key = PromptGroups.of(sequences_of(RAGGED)), torch.zeros(13, 2, 8)
    for threads, expected in ((6, True), (7, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert is_parallel(groups, key) == expected


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_on_processors_with_shorter_vectors(
    processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 4 and of 8 numbers; those of this machine may have 16."""
    kernels_for(processor, monkeypatch, tmp_path)
    for window in (None, 9):
        check(LONG, (4, 2, 24), torch.float32, window)


def passes_on_rank(rank: int, new_group: NewGroup, folder: str) -> list[tuple[int, list[Tensor]]]:
    """By kernels and by torch: how often the former were asked; logits, and the gradients of all weights."""
    with_kernels = _passes(rank, new_group, folder)
    with torch_operations():
        return [with_kernels, _passes(rank, new_group, folder)]


def _passes(rank: int, new_group: NewGroup, folder: str) -> tuple[int, list[Tensor]]:
    engine, asked, logits = make_engine(rank, new_group, folder, Mesh.of((0,))), list[int](), list[Tensor]()

    def counted(*given: Any) -> Tensor:
        asked.append(1)
        return attend_causally(*given)

    def finish(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, None]:
        logits.append(OutputMatrix.of(engine.model).logits(hidden))
        return logits[0].square().sum(), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_causally", counted)
        sequences = sequences_of(RAGGED)
        batches = micro_batches(
            sequences, torch.arange(len(sequences)), TokenBudget(100, 100), same_shape=False
        )
        run_schedule(engine.model, engine.groups, batches, finish)
    gradients = (p.grad for p in engine.model.parameters())
    return len(asked), [logits[0].detach(), *(x for x in gradients if x is not None)]


@pytest.mark.parametrize(
    ("variant", "layers"), [("llama", 4), ("qwen3", 4), ("qwen2 windows", 4), ("gemma2", 0)]
)
def test_a_model_computes_the_same(pool: Pool, folders: Folders, variant: str, layers: int) -> None:
    """In the layers whose scores need not be in memory."""
    [((asked, mine), (never, theirs))] = pool.run(1, passes_on_rank, folders.of(variant, False))
    assert (asked, never) == (layers, 0)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))
