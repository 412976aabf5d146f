"""Expert parallelism: who holds which experts, and how tokens get there.

`Strategy.ep` neighbouring ranks share the experts of each layer (`Sharding`). A token goes to the ranks that
hold its `top_k` experts and comes back: two all-to-alls per layer and direction (GShard, arXiv:2006.16668).
Its copies are sorted by expert on both sides, and what the experts made of them is sorted back, weighted and
summed. Tokens are taken to choose evenly. Where tp cuts experts, each of its ranks sends all tokens; to whole
experts, a part of them.
"""

from __future__ import annotations

from functools import lru_cache

from hflow.cost.comm import all_to_all_s
from hflow.cost.device import BYTES, stream_s
from hflow.plan.cluster import Cluster, DeviceKind
from hflow.plan.flops import touched_experts
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import Strategy

# Reads and writes of each copy of a token in a layer's forward pass, beside products and messages. Fitted to
# GPT-OSS-120B on H100 (benchmarks/published.py), so it stands for what the host waits for meanwhile, too:
# Megatron-core's layer asks the device how many copies go where before it can go on.
COPY_ACCESSES = 50
TILE_ROWS = 64  # of a tile of grouped products on Hopper: the least that its instructions multiply at once


def exchange_s(
    shape: ModelShape, activation_bytes: float, mesh: Mesh, cluster: Cluster, strategy: Strategy
) -> float:
    """The way to the experts of one layer and back, for tokens of `activation_bytes` on each group of tp."""
    if shape.moe is None or strategy.ep == 1:
        return 0.0
    sent = shape.moe.top_k * activation_bytes / (mesh.tp if strategy.whole_experts else 1)
    return 2 * all_to_all_s(sent, cluster, expert_peers(mesh, strategy), "dp")


def padding_flops(shape: ModelShape, tokens: float, ep: int, device: DeviceKind) -> float:
    """What the grouped products of all layers' experts multiply in vain. On CUDA they work on tiles of rows:
    the last tile of each expert that any of `tokens` tokens chooses is half empty on average, or, where it
    has few rows, all but these. CPUs multiply expert by expert, as many rows as there are."""
    if shape.moe is None or device.platform == "cpu" or not tokens:
        return 0.0
    touched = touched_experts(shape.moe, tokens, ep)
    rows = tokens * shape.moe.top_k / touched
    empty = max(TILE_ROWS / 2, TILE_ROWS - rows)
    return 2 * empty * touched * shape.expert_layers * shape.moe.parameters_of_one(shape.hidden)


def copies_s(shape: ModelShape, tokens: float, dtype: str, device: DeviceKind) -> float:
    """What is done to the copies of `tokens` tokens in the forward pass of all layers on CUDA, bound by
    memory. Every rank of tp takes as long as all of them need: NeMo-RL's on tp2 do, which have half of the
    copies each (docs/design.md). Of CPUs nothing was measured."""
    if shape.moe is None or device.platform == "cpu":
        return 0.0
    copies = shape.expert_layers * tokens * shape.moe.top_k
    return stream_s(COPY_ACCESSES * copies * shape.hidden * BYTES[dtype], device)


@lru_cache(maxsize=4096)
def expert_peers(mesh: Mesh, strategy: Strategy) -> Mesh:
    """The same devices; along dp those that share the experts of a layer."""
    ep = strategy.ep
    if strategy.whole_experts:
        return Mesh.of(mesh.devices, pp=len(mesh.devices) // ep, dp=ep)
    return Mesh.of(mesh.devices, pp=mesh.pp * mesh.dp // ep, dp=ep, cp=mesh.cp, tp=mesh.tp)


@lru_cache(maxsize=4096)
def expert_replicas(mesh: Mesh, strategy: Strategy) -> Mesh:
    """The same devices; along dp and cp those that have the same experts."""
    ep = strategy.ep
    if strategy.whole_experts:
        return Mesh.of(mesh.devices, pp=mesh.pp, dp=len(mesh.devices) // mesh.pp // ep, tp=ep)
    if mesh.cp == 1:
        return Mesh.of(mesh.devices, pp=mesh.pp, dp=mesh.dp // ep, tp=ep * mesh.tp)
    axes = ("pp", mesh.pp), ("dp", mesh.dp // ep), ("ep", ep), ("cp", mesh.cp), ("tp", mesh.tp)
    return Mesh(mesh.devices, axes)
