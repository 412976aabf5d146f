"""One execution of a node on a mesh: what its time depends on, and the messages between its devices."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.cost.comm import all_reduce_s, axis_link, send_s
from hflow.cost.device import BYTES, device_of
from hflow.cost.experts import exchange_s
from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload


@dataclass(frozen=True)
class Execution:
    """`micro_batch` rows per replica pass through the model at once; of a generate node, a wave of them."""

    shape: ModelShape
    dtype: str
    work: Workload
    mesh: Mesh
    micro_batch: int
    cluster: Cluster
    strategy: Strategy = PLAIN

    @property
    def device(self) -> DeviceKind:
        return device_of(self.cluster, self.mesh)

    def activation_bytes(self, tokens: float) -> float:
        """What stage gives to stage, and an all-reduce over tp sums."""
        return tokens * self.shape.hidden * BYTES[self.dtype]

    def messages_s(self, tokens: float) -> float:
        """Of each layer, in one direction: two all-reduces over tp, and the way to the experts and back."""
        size = self.activation_bytes(tokens)
        seconds = 2 * all_reduce_s(size, self.mesh.tp, axis_link(self.cluster, self.mesh, "tp"))
        seconds += exchange_s(self.shape, size, self.mesh, self.cluster, self.strategy)
        return seconds * self.shape.num_layers

    def hop_s(self, tokens: float) -> float:
        """The activations on their way to the next stage."""
        if self.mesh.pp == 1:
            return 0.0
        return send_s(self.activation_bytes(tokens), axis_link(self.cluster, self.mesh, "pp"))
