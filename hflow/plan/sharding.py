"""How a model's weights are split over a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hflow.plan.engine_registry import DEFAULT_ENGINE, GenerationEngine
from hflow.plan.layout import Mesh
from hflow.plan.strategy import PLAIN, Strategy


@dataclass(frozen=True)
class Sharding:
    """Over pp and tp always; experts also over `ep` neighbouring ranks of dp (rank d holds part d mod ep of
    them: Megatron's order); with `fully` each shard is split once more, by its rows, over the ranks of dp
    that share it (ZeRO-3, FSDP). Engines share no memory, so equal weights of two of them are two copies.
    Rank r of pp holds `vpp` chunks of layers: of all in order, chunks r, r + pp, and so on.

    With `whole_experts` tp cuts none of them: they are spread over `ep` neighbouring ranks of a stage, which
    are whole groups of tp (Megatron's `expert_tensor_parallel_size: 1`).
    """

    mesh: Mesh
    ep: int = 1
    fully: bool = False
    engine: GenerationEngine = DEFAULT_ENGINE
    vpp: int = 1
    whole_experts: bool = False

    def __post_init__(self) -> None:
        assert self.ep >= 1 and spreads(self.mesh, self.ep, self.whole_experts), self

    @property
    def expert_tp(self) -> int:
        """Into how many parts tp cuts an expert."""
        return 1 if self.whole_experts else self.mesh.tp

    @cached_property
    def expert_peers(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that share the experts of a layer, by the part that each holds."""
        groups = self.mesh.groups("dp", "cp", "tp") if self.whole_experts else self.mesh.groups("dp")
        found = (
            group[first : first + self.ep] for group in groups for first in range(0, len(group), self.ep)
        )
        # Of whole experts a device's part is its place in a process group, whose ranks ascend.
        return tuple(tuple(sorted(peers)) if self.whole_experts else peers for peers in found)

    @cached_property
    def expert_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that hold the same experts: along dp and cp."""
        if self.whole_experts:
            sets = len(self.expert_peers) // self.mesh.pp
            stages = (self.expert_peers[stage * sets :][:sets] for stage in range(self.mesh.pp))
            return tuple(same for stage in stages for same in zip(*stage))
        return tuple(
            tuple(device for index, device in enumerate(group) if index // self.mesh.cp % self.ep == part)
            for group in self.mesh.groups("dp", "cp")
            for part in range(self.ep)
        )

    @cached_property
    def expert_parts(self) -> Mapping[int, int]:
        """Which part of the experts each device holds."""
        return {device: part for peers in self.expert_peers for part, device in enumerate(peers)}

    @staticmethod
    def of(mesh: Mesh, strategy: Strategy = PLAIN) -> Sharding:
        return Sharding(
            mesh, strategy.ep, strategy.zero == 3, strategy.engine, strategy.vpp, strategy.whole_experts
        )


def spreads(mesh: Mesh, ep: int, whole_experts: bool) -> bool:
    """Whether the ranks of `mesh` make whole sets of `ep` that share experts."""
    if not whole_experts:
        return mesh.dp % ep == 0
    return mesh.tp > 1 and ep % mesh.tp == 0 and mesh.copies * mesh.tp % ep == 0
