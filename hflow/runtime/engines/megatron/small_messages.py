"""Sums and gathers of the small tensors of a decoding step.

On CPUs every rank sends its part to every other one. gloo's own collectives pass through threads and hop from
rank to rank, which takes two to three times as long where only latency counts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

SMALL_BYTES = 2**18  # above, bytes count


def sum_of(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over `group`, the same on all of its ranks to the bit; in the memory of `part`."""
    if group.size() == 1:
        return part
    if part.is_cuda or part.nbytes > SMALL_BYTES:
        dist.all_reduce(part, group=group)
        return part
    return torch.sum(gathered(part, group), 0, out=part)


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, ``[ranks, *part]``."""
    parts = part.new_empty(group.size(), *part.shape)
    if part.is_cuda or part.nbytes > SMALL_BYTES:
        dist.all_gather(list(parts), part, group=group)
        return parts
    ranks = dist.get_process_group_ranks(group)
    others = [(place, rank) for place, rank in enumerate(ranks) if place != group.rank()]
    parts[group.rank()] = part
    waits = [dist.irecv(parts[place], rank, group) for place, rank in others]
    waits += [dist.isend(part, rank, group) for _, rank in others]
    for wait in waits:
        wait.wait()  # pyright: ignore[reportOptionalMemberAccess]
    return parts
