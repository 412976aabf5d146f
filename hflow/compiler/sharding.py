"""How a model's weights are split over a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.compiler.cost.strategy import PLAIN, Strategy
from hflow.compiler.layout import Mesh


@dataclass(frozen=True)
class Sharding:
    """Over pp and tp always; experts also over `ep` neighbouring ranks of dp (rank d holds part d mod ep of
    them); with `fully` each shard is split once more, over dp (ZeRO-3, FSDP).
    """

    mesh: Mesh
    ep: int = 1
    fully: bool = False

    @staticmethod
    def of(mesh: Mesh, strategy: Strategy = PLAIN) -> Sharding:
        return Sharding(mesh, strategy.ep, strategy.zero == 3)
