"""All-gather and reduce-scatter of parts that ranks send each other, beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import gloo_collectives
from tests.engines.processes import Pool

ROWS, WIDTH = 12, 5  # of what is scattered: as many parts as there are ranks, 2 to 4


def given(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


def both_on_rank(rank: int, new_group: NewGroup, ranks: tuple[int, ...], dtype: torch.dtype) -> Any:
    """What ours and what torch's give, into memory of its own and into a part of what is given."""
    group, mine = new_group(ranks), given(rank, dtype)
    if rank not in ranks:
        return None
    place = slice(*(ROWS // len(ranks) * (ranks.index(rank) + i) for i in (0, 1)))
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def compare(name: str, ours: Callable[..., Any], theirs: Callable[..., Any], whole_first: bool) -> None:
        for is_part in (False, True):
            results: list[Tensor] = []
            for collective in (ours, theirs):
                whole = mine.clone()
                part = whole[place] if is_part else whole[place].clone()
                pair = (whole, part) if whole_first else (part, whole)
                assert collective(*pair, group=group) is None
                results.append(pair[0].clone())
            found[f"{name}, {is_part}"] = results[0], results[1]

    compare("all-gather", gloo_collectives.all_gather, dist.all_gather_into_tensor, True)
    compare("reduce-scatter", gloo_collectives.reduce_scatter, dist.reduce_scatter_tensor, False)
    return found


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_torchs(pool: Pool, ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    for found in pool.run(4, both_on_rank, ranks, dtype):
        for name, (ours, theirs) in (found or {}).items():
            exact = "gather" in name or len(ranks) == 2  # of three numbers the order of sums matters
            tolerance = 0.0 if exact else 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)


def several_on_rank(rank: int, new_group: NewGroup) -> list[Tensor]:
    """Sums and gathered parts of eight collectives that are all under way before the first is waited for."""
    group = new_group((0, 1, 2))
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for number in range(4):
        scattered, gathered = given(rank, torch.float32) * (number + 1), torch.zeros(3, 2)
        part = scattered.tensor_split(3)[rank]
        pending += [
            (gloo_collectives.reduce_scatter(part, scattered, group=group, async_op=True), part, scattered),
            (
                gloo_collectives.all_gather(gathered, torch.full((1, 2), float(rank + number)), group, True),
                gathered,
                gathered,
            ),
        ]
    for message, _, _ in reversed(pending):
        message.wait()
    return [result for _, result, _ in pending]


def test_several_may_be_under_way(pool: Pool) -> None:
    """Parts of one are not taken for those of another."""
    whole = sum(given(rank, torch.float64) for rank in range(3))
    assert isinstance(whole, Tensor)
    for rank, results in enumerate(pool.run(3, several_on_rank)):
        for number in range(4):
            part = whole.tensor_split(3)[rank] * (number + 1)
            torch.testing.assert_close(results[2 * number], part.float(), rtol=1e-6, atol=1e-6)
            expected = torch.arange(3.0)[:, None].expand(3, 2) + number
            assert torch.equal(results[2 * number + 1], expected)


def sent_on_rank(rank: int, new_group: NewGroup) -> dict[str, int]:
    """Bytes that a rank of three sends."""
    group, whole, sent = new_group((0, 1, 2)), given(rank, torch.float32), list[int]()
    isend = dist.isend

    def counting(part: Tensor, **to: Any) -> Any:
        sent.append(part.nbytes)
        return isend(part, **to)

    dist.isend = counting
    try:
        gloo_collectives.reduce_scatter(whole.tensor_split(3)[rank], whole, group=group)
        scattered = sum(sent)
        gloo_collectives.all_gather(whole, whole.tensor_split(3)[rank], group)
    finally:
        dist.isend = isend
    return {"reduce-scatter": scattered, "all-gather": sum(sent) - scattered}


def test_ranks_send_what_the_cost_model_counts(pool: Pool) -> None:
    """(n - 1) / n of the whole, as a ring does."""
    most = ROWS * WIDTH * 4 * 2 // 3
    assert pool.run(3, sent_on_rank) == [{"reduce-scatter": most, "all-gather": most}] * 3


def test_on_cuda_they_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    x: Any = OnCuda()
    asked = list[tuple[str, Any]]()
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, lambda *a, name=name, **k: asked.append((name, (a, k))) or "handle")
    assert gloo_collectives.reduce_scatter(x, x, dist.ReduceOp.AVG, None, True) == "handle"
    assert gloo_collectives.all_gather(x, x, None, True) == "handle"
    told = {"group": None, "async_op": True}
    assert asked == [
        ("reduce_scatter_tensor", ((x, x), told | {"op": dist.ReduceOp.AVG})),
        ("all_gather_into_tensor", ((x, x), told)),
    ]


def refused_on_rank(rank: int, new_group: NewGroup) -> list[bool]:
    """Whether each of these is refused before anything is sent."""
    group, whole = new_group((0, 1)), given(rank, torch.float32)
    half = whole[: ROWS // 2].clone()
    pairs = [(whole, half[1:]), (whole, half.double()), (whole[:5], half), (whole.t().contiguous().t(), half)]
    refused: list[bool] = []
    for collective, swapped in ((gloo_collectives.all_gather, 1), (gloo_collectives.reduce_scatter, -1)):
        for pair in pairs:
            try:
                collective(*pair[::swapped], group=group)
            except AssertionError:
                refused.append(True)
            else:
                refused.append(False)
    return refused


def test_parts_that_do_not_fit_are_refused(pool: Pool) -> None:
    """They would end the process that receives them."""
    assert pool.run(2, refused_on_rank) == [[True] * 8] * 2
