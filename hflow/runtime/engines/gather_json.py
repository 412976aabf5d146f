"""What ranks tell each other beside tensors, as JSON: nothing that a peer sends can run here.

torch's collectives for objects send pickles, and who opens a pickle runs the code of who sent it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_json(value: Any, group: ProcessGroup) -> list[Any]:
    """The values of all ranks of `group`, in order; tuples come back as lists. Collective."""
    told = _bytes(value)
    sizes = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(told)]), group=group)
    found = torch.empty(group.size(), int(sizes.max()), dtype=torch.uint8)
    padded = told.new_zeros(found.shape[1])
    padded[: len(told)] = told
    dist.all_gather(list(found), padded, group=group)
    return [_value(row[:size]) for row, size in zip(found, sizes.tolist(), strict=True)]


def broadcast_json(value: Any, group: ProcessGroup) -> Any:
    """The value of the first rank of `group`, on all of them; those of the others are not looked at.
    Collective."""
    told = _bytes(value if group.rank() == 0 else None)
    size = torch.tensor([len(told)])
    dist.broadcast(size, group=group, group_src=0)
    told = told if group.rank() == 0 else told.new_empty(int(size))
    dist.broadcast(told, group=group, group_src=0)
    return _value(told)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(told: Tensor) -> Any:
    return json.loads(told.numpy().tobytes())
