"""Attention to shared prompts against that of rows alone, written out."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hflow.plan import shared_attention
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.pack import Pack, RowPlaces
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.shared_prompts import SharedPrompts
from tests.engines.models import Folders, make_engine
from tests.engines.processes import Pool
from tests.engines.test_pack import RAGGED, sequences_of

HEADS, PAIRS, WIDTH = 4, 2, 8
ROW = st.tuples(st.lists(st.integers(3, 4), min_size=1, max_size=5), st.lists(st.integers(3, 9), max_size=7))
ALWAYS = patch.object(shared_attention, "WORTH", math.inf)
NEVER = patch.object(shared_attention, "WORTH", 0)


def alone(places: RowPlaces, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each row's scores in memory; of a token that rows share what the first of them has."""
    found = torch.zeros_like(query)
    for row, length in enumerate(places.lengths.tolist()):
        at, own = places.places[row, :length], places.own[row, :length]
        keys, values = (x[at].repeat_interleave(HEADS // PAIRS, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[at], keys) / math.sqrt(WIDTH)
        scores = scores + torch.full((length, length), -math.inf, dtype=scores.dtype).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        found = found.index_put((at[own],), out[own])
    return found


def made(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(tokens, heads, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (HEADS, PAIRS, PAIRS)
    ]


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), st.integers(0, 3))
def test_attention_and_its_gradients_are_those_of_rows_alone(
    rows: list[tuple[list[int], list[int]]], padding: int
) -> None:
    sequences = sequences_of(rows)
    with ALWAYS:
        pack = Pack.of(sequences)
    pack = pack.padded(len(pack.tokens) + padding)
    tensors = made(len(pack.tokens), torch.float64)
    upstream = torch.randn(len(pack.tokens), HEADS, WIDTH, dtype=torch.float64)
    assert pack.shared
    found, expected = pack.shared.attend(*tensors), alone(RowPlaces.of(sequences), *tensors)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(x, tensors, upstream) for x in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_types_of_models(dtype: torch.dtype) -> None:
    rows = [([5 + n % 3] * 40, [7] * (2 * n)) for n in range(15)]
    sequences = sequences_of(rows)
    pack = Pack.of(sequences)
    assert pack.shared, "it is worth it"
    tensors = made(len(pack.tokens), dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    found, expected = pack.shared.attend(*tensors), alone(RowPlaces.of(sequences), *wide)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, tensors, upstream.to(dtype))
    theirs = torch.autograd.grad(expected, wide, upstream.to(dtype).double())
    for own, other in zip((found, *gradients), (expected, *theirs), strict=True):
        assert own.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6 * float(other.detach().abs().max())
        torch.testing.assert_close(own.double(), other, rtol=0, atol=tolerance)


def test_every_score_is_made_once() -> None:
    """8 responses of 64 tokens to a prompt of 256: of whole rows more than twice as many."""
    sequences = sequences_of([([5] * 256, [7] * 65)] * 8)
    shared = Pack.of(sequences).shared
    assert shared
    own, before = (
        sum(len(part.queries.at) * part.keys.shape[1] for part in parts)
        for parts in (shared.own, shared.before)
    )
    assert own == 256**2 + 8 * 64**2 and before == 8 * 64 * 256


def test_prompts_of_one_length_are_taken_together() -> None:
    """Short rows would spend their time on starting products of each. Padding is no more than a quarter."""
    alike = [([5 + n // 4] * 60, [7] * 9) for n in range(32)]
    others = [([90 + n // 4] * 61, [7] * (3 + 20 * (n // 4))) for n in range(8)]
    shared = Pack.of(sequences_of([*alike, *others])).shared
    assert shared
    shapes = sorted((part.queries.shape, part.keys.shape) for part in shared.before)
    assert shapes == [((1, 4 * 2), (1, 61)), ((1, 4 * 22), (1, 61)), ((8, 4 * 8), (8, 60))]


def test_where_little_is_shared_rows_are_whole() -> None:
    alone = [([5, 6, n], [7] * 9) for n in range(4)]
    short = [([5, 6], [n] * 9) for n in range(4)]
    for rows in (alone, short):
        assert Pack.of(sequences_of(rows)).shared is None


def passes_on_rank(rank: int, new_group: NewGroup, folder: str) -> list[tuple[int, list[Tensor]]]:
    """Of attention to shared prompts and of whole rows: how often the former was asked; logits, and the
    gradients of all weights."""
    return [_passes(rank, new_group, folder, way) for way in (ALWAYS, NEVER)]


def _passes(rank: int, new_group: NewGroup, folder: str, way: Any) -> tuple[int, list[Tensor]]:
    engine, asked, logits = make_engine(rank, new_group, folder, Mesh.of((0,))), list[int](), list[Tensor]()
    attend = SharedPrompts.attend

    def counted(self: SharedPrompts, *tensors: Tensor) -> Tensor:
        asked.append(1)
        return attend(self, *tensors)

    def finish(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, None]:
        logits.append(OutputMatrix.of(engine.model).logits(hidden))
        return logits[0].square().sum(), None

    with way, patch.object(SharedPrompts, "attend", counted):
        sequences = sequences_of(RAGGED)
        batches = micro_batches(sequences, torch.arange(len(sequences)), 5, same_shape=False)
        run_schedule(engine.model, engine.groups, batches, finish)
    gradients = (p.grad for p in engine.model.parameters())
    return len(asked), [logits[0].detach(), *(x for x in gradients if x is not None)]


@pytest.mark.parametrize(
    ("variant", "layers"), [("llama", 4), ("qwen3", 4), ("qwen2 windows", 2), ("gemma2", 0)]
)
def test_a_model_computes_the_same(pool: Pool, folders: Folders, variant: str, layers: int) -> None:
    """In the layers that see all tokens, if scores need not be in memory."""
    [((asked, mine), (never, theirs))] = pool.run(1, passes_on_rank, folders.of(variant, False))
    assert (asked, never) == (layers, 0)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))
