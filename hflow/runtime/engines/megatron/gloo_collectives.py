"""All-gather and reduce-scatter over gloo, in which ranks send each other their parts.

gloo's own reduce-scatter is an all-reduce of a copy, of which each rank keeps its part: that moves twice as
much. Its all-gather copies twice what it moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: of all ranks


@dataclass
class PendingParts:
    """Parts that are under way; `finish` waits for them and does what there is to do with them, once."""

    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


def reduce_scatter(
    output: Tensor,
    given: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """The sum over ranks of one part of what each has `given`, which has as many equal parts as there are
    ranks, by its first dim. `output` may be the rank's own part of it. As `dist.reduce_scatter_tensor`,
    which it is on CUDA.

    Returns:
        With `async_op` what to `wait` for, else None.
    """
    if given.is_cuda:
        return dist.reduce_scatter_tensor(output, given, op=op, group=group, async_op=async_op)
    assert op == dist.ReduceOp.SUM and _fit(given, output, group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts, others = given.tensor_split(ranks), [r for r in range(ranks) if r != rank]
    received = [torch.empty_like(output) for _ in others]
    arriving = [_receive(part, r, group) for part, r in zip(received, others, strict=True)]
    leaving = [_send(parts[r], r, group) for r in others]

    def add() -> None:
        if output.data_ptr() != parts[rank].data_ptr():
            output.copy_(parts[rank])
        for part, arrived in zip(received, arriving, strict=True):
            arrived.wait()
            output.add_(part)
        for left in leaving:
            left.wait()

    return _finished(PendingParts(add), async_op)


def all_gather(output: Tensor, given: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """What all ranks have `given`, one after the other along the first dim. `given` may be the rank's own
    part of `output`. As `dist.all_gather_into_tensor`, which it is on CUDA.

    Returns:
        With `async_op` what to `wait` for, else None.
    """
    if given.is_cuda:
        return dist.all_gather_into_tensor(output, given, group=group, async_op=async_op)
    assert _fit(output, given, group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts, others = output.tensor_split(ranks), [r for r in range(ranks) if r != rank]
    arriving = [_receive(parts[r], r, group) for r in others]
    leaving = [_send(given, r, group) for r in others]
    if parts[rank].data_ptr() != given.data_ptr():
        parts[rank].copy_(given.view_as(parts[rank]))

    def arrive() -> None:
        for message in (*arriving, *leaving):
            message.wait()

    return _finished(PendingParts(arrive), async_op)


def _fit(whole: Tensor, part: Tensor, group: Group) -> bool:
    """gloo sends what lies in memory; one that receives more than it expects ends its process."""
    ranks = dist.get_world_size(group)
    equal = len(whole) % ranks == 0 and whole.numel() == ranks * part.numel() and whole.dtype == part.dtype
    return equal and whole.is_contiguous() and part.is_contiguous()


def _finished(parts: PendingParts, async_op: bool) -> PendingParts | None:
    if async_op:
        return parts
    parts.wait()
    return None


def _send(part: Tensor, to: int, group: Group) -> dist.Work:
    sent = dist.isend(part, group=group, group_dst=to)
    assert sent is not None, "this rank is not in the group"
    return sent


def _receive(part: Tensor, from_: int, group: Group) -> dist.Work:
    received = dist.irecv(part, group=group, group_src=from_)
    assert received is not None, "this rank is not in the group"
    return received
