"""Router replay: tokens pass through experts that are given, or those that are chosen are recorded.

In another layout, batch or kernel a router of the same weights can choose other experts, by the last bit of a
score. What it would then say of a sampled token is not what the sampler said. "Rollout routing replay"
(arXiv:2510.11370) lets the sampler's choices stand: only the weights of the experts are computed anew, of the
router's own probabilities, so that it learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.runtime.engines.megatron.context_shard import ContextShard
from hflow.runtime.engines.megatron.moe.router import Router
from hflow.runtime.engines.megatron.pack import Pack


@dataclass(frozen=True)
class RoutedTokens:
    """What routers are told of the places of a micro-batch that they see.

    Attributes:
        rows: int64 ``[places]``: how many rows have the token.
        experts: int16 ``[places, layers, top_k]``, over all layers with experts of the model, negative where
            the router chooses itself; None: it does so everywhere.
    """

    rows: Tensor
    experts: Tensor | None = None

    @staticmethod
    def of(pack: Pack | ContextShard, top_k: int, sp: ProcessGroup | None = None) -> RoutedTokens:
        """`sp`: the tensor-parallel group whose ranks each have a part of the places."""
        rows, routes = pack.num_rows, pack.routes
        if sp:
            rows, routes = (None if x is None else x.chunk(sp.size())[sp.rank()] for x in (rows, routes))
        assert rows is not None
        if routes is None:
            return RoutedTokens(rows)
        return RoutedTokens(rows, routes.to(rows.device).unflatten(1, (-1, top_k)))

    def of_layer(self, number: int) -> Tensor | None:
        """``[places, top_k]``, of layer `number` of those with experts."""
        return None if self.experts is None else self.experts[:, number]


@contextmanager
def recorded(model: torch.nn.Module, on: bool = True) -> Iterator[Recorder | None]:
    """Within, the routers of a model tell what they choose, if `on`."""
    if not on:
        yield None
        return
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.records = True
    try:
        yield Recorder(routers)
    finally:
        for router in routers:
            router.records, router.recorded = False, None


@dataclass(frozen=True)
class Recorder:
    routers: list[Router]

    def newest(self) -> Tensor:
        """int16 ``[tokens, layers * top_k]``, of the tokens of the last pass."""
        found = [router.recorded for router in self.routers if router.recorded is not None]
        assert len(found) == len(self.routers), "no pass since they record"
        return torch.stack(found, 1).flatten(1).to(torch.int16)
