"""Where ranks of tp begin and end to make each a part of the same thing, with places whole around that part
or split over them (sequence parallelism)."""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup


def into_parts(x: Tensor, tp: ProcessGroup, sp: bool) -> Tensor:
    """All places ``[places, ...]``, of which ranks make parts: their gradients are summed. `sp`: x is this
    rank's part of the places."""
    enter = gather_from_sequence_parallel_region if sp else copy_to_tensor_model_parallel_region
    return enter(x, group=tp)


def sum_of_parts(x: Tensor, tp: ProcessGroup, sp: bool) -> Tensor:
    """The sum of what ranks have made of all places ``[places, ...]``; with `sp`, this rank's part of it."""
    leave = reduce_scatter_to_sequence_parallel_region if sp else reduce_from_tensor_model_parallel_region
    return leave(x, group=tp)
