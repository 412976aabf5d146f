"""The gradients of key-value heads that several ranks of tp have.

Each of these ranks has some of the queries of its head, whose gradients of the projections to keys and values
are a part of the whole: they are summed over the ranks, after which all of them make the same update. Such a
rank has one head, so that of a fused projection its key and value are the last rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron.adapter import QKV
from hflow.runtime.engines.megatron.interleaved import chunks_of
from hflow.runtime.engines.megatron.shaped_config import shape_of_model

Elements = tuple[int, int]  # of a parameter: first and last, without the last


@dataclass(frozen=True)
class KvCopies:
    """`group`: the ranks with the same head. `parts`: trained parameters whose elements from this one on
    belong to keys and values; none, where each head is on one rank."""

    group: dist.ProcessGroup
    parts: tuple[tuple[torch.nn.Parameter, int], ...]

    @staticmethod
    def of(model: torch.nn.Module, groups: Groups) -> KvCopies:
        if groups.kv.size() == 1:
            return KvCopies(groups.kv, ())
        shape = shape_of_model(model)
        layers = [layer for chunk in chunks_of(model) for layer in chunk.decoder.layers]
        found = (part for layer in layers for part in _parts(layer.get_submodule(QKV), shape))
        return KvCopies(groups.kv, tuple((p, first) for p, first in found if p.requires_grad))

    def sum_gradients(self) -> None:
        """Over the group, in Megatron's buffers."""
        sums = [
            dist.all_reduce(_gradient(p)[first:], group=self.group, async_op=True) for p, first in self.parts
        ]
        for work in sums:
            assert work
            work.wait()

    def repeated_square(self, owned: Callable[[torch.nn.Parameter], Elements]) -> float:
        """This rank's part of what the square of the gradient's norm counts more than once.

        Args:
            owned: the elements of a parameter that this rank counts.
        """
        norms: list[Tensor] = []
        for parameter, head in self.parts:
            first, last = owned(parameter)
            norms.append(torch.linalg.vector_norm(_gradient(parameter)[max(first, head) : last]))
        copies = self.group.size()
        return float(torch.stack(norms).double().square().sum()) * (copies - 1) / copies if norms else 0.0


def _parts(fused: Any, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, int]]:
    for parameter in (fused.weight, fused.bias):
        if parameter is not None:
            yield parameter, parameter.numel() * (len(parameter) - 2 * shape.head_dim) // len(parameter)
    adapter: Any = getattr(fused, "adapter", None)
    for name, low_rank in adapter.named_children() if adapter is not None else ():
        if name in ("k_proj", "v_proj"):
            yield low_rank.lora_B.weight, 0


def _gradient(parameter: Any) -> Tensor:
    return parameter.main_grad.view(-1)
