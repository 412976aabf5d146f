"""Who computes a node: its engine, mesh, parallel strategy and predicted figures."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.plan.engine_registry import EngineName
from hflow.plan.layout import Mesh
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy


@dataclass(frozen=True)
class NodePlan:
    """One node on its mesh.

    `micro_batch`: rows of the greatest lengths that one data-parallel rank has memory for at once; in
    training and scoring more pass together where they are shorter (`hflow.plan.packing`). `start_s`: seconds
    from the start of the step; `time_s`: of all its executions in a step; `memory_bytes`: the node's own peak
    on one device. `offload`: while the node does not run, what it alone needs is in the host's memory: the
    optimizer's state of a train node, the weights of a frozen model. `cache_tokens`: of a generate node, for
    how many tokens the KV cache of a replica has room; 0: for `micro_batch` rows of the greatest length.
    """

    node: str
    kind: str
    model: str | None
    engine: EngineName
    mesh: Mesh
    micro_batch: int
    start_s: float
    time_s: float
    memory_bytes: int
    strategy: Strategy = PLAIN
    offload: bool = False
    cache_tokens: int = 0

    def cached(self, sequence: int) -> int:
        """For how many tokens its KV cache has room, where rows have `sequence` at most."""
        return self.cache_tokens or self.micro_batch * sequence

    @property
    def sharding(self) -> Sharding:
        """How the weights that the node uses are split."""
        return Sharding.of(self.mesh, self.strategy)


def layout_text(mesh: Mesh, strategy: Strategy, offload: bool) -> str:
    """How nodes run: what is split, ``zero1``, ``ep8``, ``recompute``, ``offload``; empty if nothing is."""
    sizes = [f"{axis}{size}" for axis, size in mesh.axes if size > 1]
    return " ".join((*sizes, *strategy.marks, *("offload",) * offload))
