"""Time of generate, score and train nodes on a mesh.

Formulas: a forward pass costs 2N FLOP per token plus 4·q·context per layer for attention (q: query
width); training three times that (Megatron-LM, arXiv:2104.04473); decoding is the larger of its
FLOP time and the time to read the weights once per token (roofline); a pipeline of p stages and m
micro-batches takes (m + p - 1) slots (1F1B).
"""

from __future__ import annotations

from math import ceil

from hflow.compiler.cluster import Cluster
from hflow.compiler.cost.comm import all_reduce_s, link_between, send_s
from hflow.compiler.layout import Mesh
from hflow.compiler.shape import ModelShape
from hflow.compiler.workload import Workload
from hflow.graph.graph import OpKind

BYTES = {"f32": 4, "bf16": 2}


def node_time_s(
    op: OpKind, shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int, cluster: Cluster
) -> float:
    """Seconds that one execution of the node takes on `mesh`."""
    if op == "generate":
        return _generate_s(shape, dtype, work, mesh, micro_batch, cluster)
    if op == "score":
        micro_batches = ceil(work.rows / mesh.dp / micro_batch)
        return _passes_s(shape, dtype, work, mesh, micro_batch, micro_batches, cluster, forward_factor=1)
    micro_batches = ceil(work.rows_per_update / mesh.dp / micro_batch)
    passes = _passes_s(shape, dtype, work, mesh, micro_batch, micro_batches, cluster, forward_factor=3)
    return work.optimizer_steps * (passes + _update_s(shape, mesh, cluster))


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that take part in matrix products: all but the embedding table."""
    return shape.num_parameters - (0 if shape.tied else shape.vocab * shape.hidden)


def forward_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of a forward pass over `tokens` tokens that attend to `context` positions on average."""
    attention = 4 * shape.num_heads * shape.head_dim * context * shape.num_layers
    return tokens * (2 * matmul_parameters(shape) + attention)


def _rate(cluster: Cluster) -> float:
    return cluster.device.flops * cluster.device.efficiency


def _passes_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    micro_batches: int,
    cluster: Cluster,
    forward_factor: int,
) -> float:
    """Forward (factor 1) or forward and backward (factor 3) passes of one data-parallel replica."""
    tokens = micro_batch * work.sequence
    layers = shape.num_layers / mesh.pp
    flops = forward_flops(shape, tokens, work.sequence / 2) / (mesh.pp * mesh.tp)
    activation = tokens * shape.hidden * BYTES[dtype]
    link = link_between(cluster, mesh.groups("tp")[0])
    reduces = 2 * layers * (2 if forward_factor == 3 else 1)
    slot = forward_factor * (flops / _rate(cluster) + layers * cluster.device.layer_overhead_s)
    slot += reduces * all_reduce_s(activation, mesh.tp, link)
    if mesh.pp > 1:
        hop = link_between(cluster, mesh.groups("pp")[0])
        slot += send_s(activation, hop) * (2 if forward_factor == 3 else 1)
    return (micro_batches + mesh.pp - 1) * slot


def _update_s(shape: ModelShape, mesh: Mesh, cluster: Cluster) -> float:
    """Gradient all-reduce over dp, then Adam: it reads and writes weight, gradient and two moments."""
    local = shape.num_parameters / (mesh.pp * mesh.tp)
    link = link_between(cluster, mesh.groups("dp")[0])
    return all_reduce_s(4 * local, mesh.dp, link) + 2 * 16 * local / cluster.device.memory_bandwidth


def _generate_s(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int, cluster: Cluster
) -> float:
    device = cluster.device
    link = link_between(cluster, mesh.groups("tp")[0])
    batches = ceil(work.rows / mesh.dp / micro_batch)
    prompts = micro_batch / work.samples
    prefill = forward_flops(shape, prompts * work.prompt, work.prompt / 2) / mesh.tp / _rate(cluster)
    decode = forward_flops(shape, micro_batch, work.prompt + work.response / 2) / mesh.tp / _rate(cluster)
    read = shape.num_parameters * BYTES[dtype] / mesh.tp / device.memory_bandwidth
    reduces = 2 * shape.num_layers
    reduce_s = all_reduce_s(micro_batch * shape.hidden * BYTES[dtype], mesh.tp, link)
    token = max(decode, read) + shape.num_layers * device.layer_overhead_s + reduces * reduce_s
    return batches * (prefill + work.response * token)
