"""How a model's weights are split over a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.plan.engine_registry import DEFAULT_ENGINE, GenerationEngine
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy


@dataclass(frozen=True)
class Sharding:
    """Over pp and tp always; experts also over `ep` neighbouring ranks of dp (rank d holds part d mod ep of
    them: Megatron's order); with `fully` each shard is split once more, by its rows, over the ranks of dp
    that share it (ZeRO-3, FSDP). Engines share no memory, so equal weights of two of them are two copies.
    Rank r of pp holds `vpp` chunks of layers: of all in order, chunks r, r + pp, and so on.
    """

    mesh: Mesh
    ep: int = 1
    fully: bool = False
    engine: GenerationEngine = DEFAULT_ENGINE
    vpp: int = 1

    def __post_init__(self) -> None:
        assert self.ep >= 1 and self.mesh.dp % self.ep == 0, self

    @property
    def expert_peers(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that share the experts of a layer, by the part that each holds."""
        return tuple(
            group[first : first + self.ep]
            for group in self.mesh.groups("dp")
            for first in range(0, len(group), self.ep)
        )

    @property
    def expert_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that hold the same experts: along dp and cp."""
        return tuple(
            tuple(device for index, device in enumerate(group) if index // self.mesh.cp % self.ep == part)
            for group in self.mesh.groups("dp", "cp")
            for part in range(self.ep)
        )

    @staticmethod
    def of(mesh: Mesh, strategy: Strategy = PLAIN) -> Sharding:
        return Sharding(mesh, strategy.ep, strategy.zero == 3, strategy.engine, strategy.vpp)
