"""The process groups of a plan: of every mesh, and of the two ends of every edge."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from hflow.plan.layout import Mesh
from hflow.plan.plan import Plan
from hflow.runtime.worker.world import Peers


class PeerGroups:
    """Made in plan order, which all ranks share."""

    def __init__(self, plan: Plan, group: Callable[[tuple[int, ...]], dist.ProcessGroup]):
        """Collective over the world. `group`: makes one of some ranks."""
        ends = [(node.mesh,) for node in plan.all_nodes]
        ends += [(edge.source_mesh, edge.target_mesh) for program in plan.programs for edge in program.edges]
        keys = dict.fromkeys(_ranks(*meshes) for meshes in ends)
        self._peers = {key: Peers(key, group(key)) for key in keys}

    def of(self, *meshes: Mesh) -> Peers:
        """Those of all devices of some meshes together."""
        return self._peers[_ranks(*meshes)]


def _ranks(*meshes: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device for mesh in meshes for device in mesh.devices}))
