"""Replicas that share experts sample together.

Every pass through a layer with experts is an exchange among the ranks that share them. Replicas end at other
tokens, and may have other numbers of rows; so each goes on, without tokens of its own, until all have ended.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.runtime.engines.megatron.moe.layer import MixtureOfExperts


class Lockstep:
    """Of the replicas that share the experts of `model`; of one replica, or a model without experts, nothing
    waits for anything."""

    def __init__(self, model: torch.nn.Module):
        found = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self._layers = found if found and found[0].ep.size() > 1 else []

    def most(self, number: int) -> int:
        """The greatest `number` of any replica. Collective over them."""
        if not self._layers:
            return number
        first = self._layers[0]
        greatest = torch.tensor(number, device=first.router.weight.device)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=first.ep)
        return int(greatest)

    def follow(self, step: int, steps: int) -> None:
        """Without rows, from their token `step` on, while other replicas make up to `steps` tokens."""
        for _ in range(step, steps - 1):
            if not self.most(0):
                return
            self.idle()

    def sit_out(self, waves: int, steps: int) -> None:
        """While others read prompts and continue them, so many times."""
        for _ in range(waves if self._layers else 0):
            self.idle()
            self.follow(0, steps)

    def idle(self) -> None:
        """A pass of no tokens."""
        for layer in self._layers:
            layer(_nothing(layer.router.weight))


def _nothing(weight: Tensor) -> Any:
    return weight.new_empty(0, weight.shape[1])
