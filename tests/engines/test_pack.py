"""Packs against transformers: hidden prompts shared, rows of all lengths, nothing padded."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.plan.layout import Mesh
from hflow.plan.packing import TokenBudget
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron.head import OutputMatrix
from hflow.runtime.engines.megatron.micro_batches import MicroBatch, micro_batches
from hflow.runtime.engines.megatron.pack import Pack
from hflow.runtime.engines.megatron.schedule import run_schedule
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.rows import from_lists
from tests.engines.models import Folders, load_hf, make_engine
from tests.engines.processes import Pool

RAGGED = [
    ([5, 6, 7], [8, 9]),
    ([5, 6, 7], [10]),
    ([5, 6], [7, 8, 9, 4, 3, 8, 6]),
    ([5, 6, 7], []),
    ([9], [9]),
]


def sequences_of(rows: list[tuple[list[int], list[int]]]) -> Sequences:
    """Of (prompt, response) pairs."""
    tokens = from_lists([prompt + response for prompt, response in rows]).padded().to(torch.int64)
    prompts, responses = (torch.tensor([len(row[i]) for row in rows]) for i in (0, 1))
    return Sequences(tokens, prompts, responses)


def test_a_prompt_is_there_once() -> None:
    pack = Pack.of(sequences_of(RAGGED))
    # Prompts 5 6 7, 5 6 and 9; responses without their last tokens.
    assert pack.tokens.tolist() == [5, 6, 7, 5, 6, 9, 8, 7, 8, 9, 4, 3, 8]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1, 0, 3, 2, 3, 4, 5, 6, 7]
    assert pack.predicted_at.tolist() == [2, 6, 2, 4, 7, 8, 9, 10, 11, 12, 5]


MOST_PROMPT, MOST_RESPONSE = 4, 6
ROW = st.tuples(
    st.lists(st.integers(3, 4), min_size=1, max_size=MOST_PROMPT),
    st.lists(st.integers(3, 9), max_size=MOST_RESPONSE),
)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12))
def test_rows_are_found_again(rows: list[tuple[list[int], list[int]]]) -> None:
    """Read through the blocks, every token of every row has its value, its position and its own outcome."""
    pack = Pack.of(sequences_of(rows))
    inputs = sorted((prompt + response[:-1] for prompt, response in rows), key=lambda row: -len(row))
    places = blocks_of(pack)
    seen = [pack.tokens[row].tolist() for block in places for row in block]
    assert [found[: len(row)] for found, row in zip(seen, inputs)] == inputs
    assert len(seen) == len(rows)
    assert pack.gather.at[pack.gather.found_at].tolist() == list(range(len(pack.tokens)))
    columns = torch.cat([torch.arange(block.shape[1]).expand_as(block).flatten() for block in places])
    assert columns[pack.gather.found_at].tolist() == pack.positions.tolist()


def blocks_of(pack: Pack) -> list[torch.Tensor]:
    """The tokens' numbers by row and position."""
    sizes = [rows * longest for rows, longest in pack.blocks]
    return [part.view(shape) for part, shape in zip(pack.gather.at.split(sizes), pack.blocks, strict=True)]


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), st.integers(0, 3))
def test_gradients_of_rows_are_those_of_torch(rows: list[tuple[list[int], list[int]]], padding: int) -> None:
    """Where rows are shorter than their block there is any token, and nothing is read."""
    pack = Pack.of(sequences_of(rows))
    pack = pack.padded(len(pack.tokens) + padding)
    gather, count = pack.gather, len(pack.tokens) - padding
    lengths = sorted((len(prompt + response[:-1]) for prompt, response in rows), reverse=True)
    inside = [
        torch.arange(width) < n for n, width in zip(lengths, (w for r, w in pack.blocks for _ in range(r)))
    ]
    read = torch.cat(inside) if count else torch.zeros(1, dtype=torch.bool)
    torch.manual_seed(len(rows))
    x, weights = torch.randn(len(pack.tokens), 2, 3), torch.randn(len(gather.at), 2, 3) * read[:, None, None]
    of_rows, of_back = torch.randn(len(pack.tokens), 2, 3), torch.randn(len(gather.at), 2, 3)
    of_rows[count:] = 0  # nothing depends on tokens of no row
    found, expected = list[torch.Tensor](), list[torch.Tensor]()
    for into, to_rows, back in (
        (found, gather.rows, gather.back),
        (expected, lambda y: y.index_select(0, gather.at), lambda y: y.index_select(0, gather.found_at)),
    ):
        a, b = x.clone().requires_grad_(), of_back.clone().requires_grad_()
        (to_rows(a) * weights).sum().backward()
        (back(b) * of_rows).sum().backward()
        assert a.grad is not None and b.grad is not None
        into.extend((to_rows(a), back(b), a.grad, b.grad))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), st.integers(1, 5), st.sampled_from((1, 2)))
def test_micro_batches_have_the_room_of_the_greatest_rows(
    rows: list[tuple[list[int], list[int]]], limit: int, unit: int
) -> None:
    """No more places than `limit` rows of the greatest length, in what attention sees and in the outputs."""
    sequences, limit = sequences_of(rows * unit), limit * unit
    budget = TokenBudget(limit * MOST_PROMPT + limit * MOST_RESPONSE, limit * MOST_RESPONSE)
    batches = micro_batches(sequences, torch.arange(len(sequences)), budget, same_shape=True, unit=unit)
    assert sorted(torch.cat([b.rows for b in batches]).tolist()) == list(range(len(sequences)))
    assert len({len(b.pack.tokens) for b in batches}) == 1
    for batch in batches:
        assert torch.equal(batch.rows[::unit] // unit, batch.rows[unit - 1 :: unit] // unit)
        assert isinstance(batch.pack, Pack)
        assert sum(rows * longest for rows, longest in batch.pack.blocks) <= budget.tokens
        assert len(batch.pack.predicted_at) <= budget.predicted
    assert len(batches) <= ceil(len(sequences) / limit)


def test_the_last_token_of_a_response_needs_no_room() -> None:
    sequences = sequences_of([([3, 4, 5], [6, 7, 8])] * 4)
    batches = micro_batches(sequences, torch.arange(4), TokenBudget(2 * 5, 100), same_shape=False)
    assert [len(batch.rows) for batch in batches] == [2, 2]


def test_no_rows_are_one_token_of_padding() -> None:
    (batch,) = micro_batches(
        sequences_of(RAGGED), torch.arange(0), TokenBudget(40, 24), same_shape=False, unit=2
    )
    assert len(batch.rows) == 0 and len(batch.sequences) == 2
    assert len(batch.pack.tokens) == 1 and len(batch.pack.predicted_at) == 0


def logits_on_rank(rank: int, new_group: NewGroup, folder: str, mesh: Mesh, limit: int) -> Any:
    """Logits before every response token, row by row; None but on the last stage."""
    engine, sequences = make_engine(rank, new_group, folder, mesh), sequences_of(RAGGED)
    budget = TokenBudget(limit * 9, limit * 7)
    batches = micro_batches(sequences, torch.arange(len(sequences)), budget, same_shape=mesh.pp > 1)

    def finish(hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Any]:
        logits = OutputMatrix.of(engine.model).logits(hidden)
        return logits.new_zeros(()), logits.split(batch.sequences.response_lengths.tolist())

    with torch.no_grad():
        parts = run_schedule(engine.model, engine.groups, batches, finish, forward_only=True)
    found = {int(row): logits.numpy() for b, part in zip(batches, parts) for row, logits in zip(b.rows, part)}
    return found or None


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("mesh", [Mesh.of((0,)), Mesh.of((0, 1), pp=2)], ids=["one", "pp2"])
def test_logits_are_those_of_rows_alone(pool: Pool, folders: Folders, mesh: Mesh, limit: int) -> None:
    folder = folders.of("qwen2", False)
    found = pool.run(len(mesh.devices), logits_on_rank, folder, mesh, limit)[-1]
    model = load_hf(folder)
    for row, (prompt, response) in enumerate(RAGGED):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        expected = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
        # float32 against float32 in another order of summation; logits reach about 5
        torch.testing.assert_close(torch.from_numpy(found[row]), expected, atol=1e-5, rtol=0)
