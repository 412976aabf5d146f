"""Expert parallelism: who holds which experts, and how tokens get there.

`Strategy.ep` neighbouring ranks of dp share the experts of each layer (`Sharding`). A token goes to the
ranks that hold its `top_k` experts and comes back: two all-to-alls per layer and direction (GShard,
arXiv:2006.16668). Tokens are taken to choose evenly.
"""

from __future__ import annotations

from functools import lru_cache

from hflow.cost.comm import all_to_all_s
from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.engine_registry import profile_of
from hflow.plan.flops import touched_experts
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import Strategy


def exchange_s(
    shape: ModelShape, activation_bytes: float, mesh: Mesh, cluster: Cluster, strategy: Strategy
) -> float:
    """The way to the experts of one layer and back, for tokens of `activation_bytes` on each rank."""
    if shape.moe is None or strategy.ep == 1:
        return 0.0
    peers = expert_peers(mesh, strategy.ep)
    return 2 * all_to_all_s(shape.moe.top_k * activation_bytes, cluster, peers, "dp")


def experts_latency_s(shape: ModelShape, rows: float, strategy: Strategy, device: DeviceKind) -> float:
    """The least time of all layers' experts that any of `rows` rows chooses, however few choose each."""
    kernels = profile_of(strategy.engine).expert_kernels
    if shape.moe is None or not kernels:
        return 0.0
    touched = touched_experts(shape.moe, rows, strategy.ep)
    return shape.expert_layers * touched * kernels * device.kernel_latency_s


@lru_cache(maxsize=4096)
def expert_peers(mesh: Mesh, ep: int) -> Mesh:
    """The same devices; along dp those that share the experts of a layer."""
    return Mesh.of(mesh.devices, pp=mesh.pp * mesh.dp // ep, dp=ep, tp=mesh.tp)


@lru_cache(maxsize=4096)
def expert_replicas(mesh: Mesh, ep: int) -> Mesh:
    """The same devices; along dp those that have the same experts."""
    return Mesh.of(mesh.devices, pp=mesh.pp, dp=mesh.dp // ep, tp=ep * mesh.tp)
