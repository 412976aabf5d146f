"""Sums and gathers of small tensors, against one process; what is large goes the backend's own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hflow.runtime.engines.megatron import small_messages
from tests.engines.processes import Pool

RANKS = (0, 1, 3)


def part_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def on_rank(rank: int, new_group: Any, dtype: torch.dtype) -> Any:
    """Sum and gather over `RANKS`, as small and as large tensors, several in a row."""
    group = new_group(RANKS)
    if rank not in RANKS:
        return None
    found: list[Any] = []
    for small_messages.SMALL_BYTES in (2**18, 0):
        for _ in range(3):
            part = part_of(rank, dtype)
            together, total = (f(part, group) for f in (small_messages.gathered, small_messages.sum_of))
            assert total.data_ptr() == part.data_ptr()
            found.append((together.float().numpy(), total.float().numpy()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same(pool: Pool, dtype: torch.dtype) -> None:
    parts = torch.stack([part_of(rank, dtype) for rank in RANKS])
    results = [found for found in pool.run(4, on_rank, dtype) if found is not None]
    assert len(results) == len(RANKS)
    atol = 0.05 if dtype == torch.bfloat16 else 1e-6
    for rank_results in results:
        for number, (together, total) in enumerate(rank_results):
            assert (torch.from_numpy(together) == parts.float()).all()
            assert (total == results[0][number][1]).all(), "ranks would sample different tokens"
            torch.testing.assert_close(torch.from_numpy(total), parts.float().sum(0), atol=atol, rtol=0)
