"""Rows move between data-parallel ranks until these have about as many tokens, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.plan.layout import Mesh
from hflow.plan.row_balance import MOST_TOKENS
from hflow.plan.sharding import Sharding
from hflow.runtime.engines.groups import NewGroup, make_groups
from hflow.runtime.engines.megatron.balance import Exchange, balanced
from hflow.runtime.rows import Rows, from_lists
from tests.engines.processes import Pool

ROWS, UNIT, MINIBATCHES = 12, 2, 3
CUTS = (0, 8, 8, 10, 12)  # rows of four ranks, of which one has none


def loads(costs: list[int], owners: list[int], ranks: int) -> list[int]:
    return [sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(ranks)]


@settings(deadline=None)
@given(st.data())
def test_no_rank_has_much_more_than_its_share(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    rows = st.lists(st.tuples(st.integers(0, 200), st.integers(0, ranks - 1)), max_size=40)
    drawn = data.draw(rows)
    costs, owners = [cost for cost, _ in drawn], [owner for _, owner in drawn]
    found = balanced(costs, owners, ranks)
    before, after = loads(costs, owners, ranks), loads(costs, found, ranks)
    assert len(found) == len(costs) and set(found) <= set(range(ranks))
    assert max(after) <= max(before)
    if max(before) * ranks <= MOST_TOKENS * sum(before):
        assert found == owners
    if max(after) * ranks > MOST_TOKENS * sum(after):
        assert max(after) - min(after) <= max(costs)


def test_equal_rows_stay_where_they_are() -> None:
    assert balanced([64] * 8, [0, 0, 0, 0, 1, 1, 1, 1], 2) == [0, 0, 0, 0, 1, 1, 1, 1]


def exchanged_on_rank(rank: int, new_group: NewGroup, values: dict[str, Rows]) -> Any:
    """The numbers of the rows that a rank has afterwards, and their values."""
    groups = make_groups(Sharding(Mesh.of((0, 1, 2, 3), dp=4)), rank, new_group)
    assert groups
    mine = {name: rows.slice(CUTS[rank], CUTS[rank + 1]) for name, rows in values.items()}
    arguments = CUTS[rank], ROWS, UNIT, MINIBATCHES, groups.dp, torch.device("cpu")
    exchange = Exchange(mine["tokens"], mine["mask"], *arguments)
    moved = {name: exchange(rows, name == "tokens") for name, rows in mine.items()}
    for name in ("mask", "advantages"):  # what has a value per response token, or per row, can go back
        assert torch.equal(exchange.back(moved[name]).values, mine[name].values)
    return exchange.rows, moved


def test_every_row_arrives_whole_and_once(pool: Pool) -> None:
    """Against the same rows taken on one process; the long rows of one rank are those of all minibatches."""
    lengths = torch.tensor([9, 8, 7, 9, 9, 6, 5, 7, 1, 0, 2, 1])
    tokens = from_lists([[row] * (int(n) + 3) for row, n in enumerate(lengths)])
    mask = Rows(torch.rand(int(lengths.sum())) > 0.5, lengths)
    values = {"tokens": tokens, "mask": mask, "advantages": Rows(torch.randn(ROWS))}
    results = pool.run(4, exchanged_on_rank, values)
    assert sorted(torch.cat([rows for rows, _ in results]).tolist()) == list(range(ROWS))
    assert results[1][0].numel() > 0
    for rows, found in results:
        assert rows.tolist() == sorted(rows.tolist())
        assert torch.equal(rows[::UNIT] + 1, rows[1::UNIT])
        for name, expected in values.items():
            taken = expected.take(rows)
            assert torch.equal(found[name].values, taken.values)
            assert taken.lengths is None or torch.equal(found[name].lengths, taken.lengths)
    for k in range(MINIBATCHES):
        sizes = [int(tokens.lengths[rows[rows // UNIT % MINIBATCHES == k]].sum()) for rows, _ in results]  # type: ignore[index]
        assert max(sizes) <= max(int(tokens.lengths[:8][torch.arange(8) // UNIT % MINIBATCHES == k].sum()), 1)  # type: ignore[index]


def test_a_group_on_two_ranks_is_refused(pool: Pool) -> None:
    rows = from_lists([[1, 2]] * 3)
    with pytest.raises(AssertionError, match="several ranks"):
        pool.run(1, split_group_on_rank, rows)


def split_group_on_rank(rank: int, new_group: NewGroup, rows: Rows) -> None:
    Exchange(rows, rows, 0, 4, 2, 1, new_group((0,)), torch.device("cpu"))
