"""Sequence parallelism: what lies between the matrix products is split over tensor-parallel ranks, too.

(Korthikanti et al., arXiv:2205.05198.) Each rank keeps and norms one part of the places; the columns of a
product gather them all, its rows scatter their sums: as many bytes as an all-reduce. Megatron's layers do so
where they are told to; they are told for one run at a time, as nodes that share a model may differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.runtime.engines.megatron.head import DeferredHead
from hflow.runtime.engines.megatron.moe.layer import MixtureOfExperts


@contextlib.contextmanager
def sequence_parallel(model: torch.nn.Module, on: bool) -> Iterator[None]:
    """Run the model so if `on`; afterwards it runs as before. Places are a multiple of tp."""
    if not on:
        yield
        return
    config: Any = get_model_config(model)
    products: list[Any] = [m for m in model.modules() if _scatters(m)]
    experts = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    parallel_state._set_global_memory_buffer()  # Megatron gathers the places of a product into it
    try:
        config.sequence_parallel = True
        for product in products:
            product.sequence_parallel, product.allreduce_dgrad = True, False
            if isinstance(product, RowParallelLinear) and product.bias is not None:
                # It is added to a part of the places. Megatron sums gradients so marked, in such runs only.
                product.bias.sequence_parallel = True  # type: ignore[attr-defined]
        for layer in experts:
            layer.sequence_parallel = True
        yield
    finally:
        parallel_state.destroy_global_memory_buffer()
        config.sequence_parallel = False
        for product in products:
            product.sequence_parallel = False
            product.allreduce_dgrad = isinstance(product, ColumnParallelLinear)
        for layer in experts:
            layer.sequence_parallel = False


def _scatters(module: torch.nn.Module) -> bool:
    """Whether places go into or out of a product of the layers. The head reads gathered ones."""
    return isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not isinstance(
        module, DeferredHead
    )


def all_places(hidden: Tensor, tp: ProcessGroup) -> Tensor:
    """``[places, 1, hidden]`` from each rank's part. A head gives its ranks the whole gradient of it each, of
    which they take their part."""
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp)
