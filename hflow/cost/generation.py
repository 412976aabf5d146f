"""Time of generation: prompts are bound by compute, new tokens by memory or compute (roofline).

Rows are generated in waves of as many as the KV cache holds. A wave reads its prompts once, then makes
tokens one by one. Each step multiplies by all weights, which takes the larger of reading them and of the
products; reads the keys and values of all rows so far; and waits for kernels and all-reduces. With
pipeline stages a wave is cut into as many parts, which follow each other through the stages.
"""

from __future__ import annotations

from math import ceil

from hflow.cost.comm import all_reduce_s, axis_link, send_s
from hflow.cost.device import (
    BYTES,
    attention_work,
    device_of,
    layer_latency_s,
    products_s,
    residual_s,
    stream_s,
)
from hflow.cost.experts import exchange_s
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import profile_of
from hflow.plan.flops import head_parameters, matmul_parameters, read_parameters
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload


def generate_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    wave: int,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """Seconds for all rows, in waves of `wave` rows per replica."""
    waves = ceil(work.rows / mesh.dp / wave)
    if not strategy.kv_cache:
        return waves * reread_s(shape, dtype, work, mesh, wave, cluster, strategy)
    prefill = prefill_s(shape, dtype, wave / work.samples, work.prompt, mesh, cluster, strategy)
    return waves * (prefill + decode_s(shape, dtype, work, mesh, wave, cluster, strategy))


def reread_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    wave: int,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """All new tokens of a wave without a KV cache: for each one everything before it is read again."""
    rows = wave * work.mean_response / work.response / mesh.pp
    length = work.prompt + work.mean_response / 2
    return work.response * prefill_s(shape, dtype, rows, length, mesh, cluster, strategy)


def prefill_s(
    shape: ModelShape,
    dtype: str,
    prompts: float,
    length: float,
    mesh: Mesh,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """Reading `prompts` prompts; only their last positions have logits."""
    device, tokens = device_of(cluster, mesh), prompts * length
    flops = 2 * (matmul_parameters(shape) - head_parameters(shape)) * tokens
    flops += 2 * head_parameters(shape) * prompts + attention_work(shape, tokens, length / 2)
    seconds = products_s(
        flops, read_parameters(shape, tokens, strategy.ep), "prefill", dtype, device, mesh.tp
    )
    seconds += residual_s(shape, tokens, dtype, device) + shape.num_layers * layer_latency_s(device)
    return seconds + _messages_s(shape, dtype, tokens, mesh, cluster, strategy)


def decode_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    wave: int,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """All new tokens of a wave. Its steps last until the longest response ends; where responses are shorter
    (`Workload.mean_response`), finished rows leave it and cost nothing."""
    device = device_of(cluster, mesh)
    rows = wave * work.mean_response / work.response / mesh.pp  # of one part, on average over the steps
    context = work.prompt + work.mean_response / 2
    flops = 2 * matmul_parameters(shape) * rows
    weights = read_parameters(shape, rows, strategy.ep)
    products = products_s(flops, weights, "prefill", dtype, device, mesh.tp)
    cache = stream_s(rows * context * shape.kv_bytes_per_token(BYTES[dtype]) / mesh.tp, device)
    latency = shape.num_layers * layer_latency_s(device)
    part = products + cache + latency + _messages_s(shape, dtype, rows, mesh, cluster, strategy)
    return work.response * (part + profile_of(strategy.engine).step_s(device.platform))


def _messages_s(
    shape: ModelShape, dtype: str, tokens: float, mesh: Mesh, cluster: Cluster, strategy: Strategy
) -> float:
    """Of each layer two all-reduces over tp and the way to the experts and back; one message between pipeline
    stages."""
    size = tokens * shape.hidden * BYTES[dtype]
    layer = 2 * all_reduce_s(size, mesh.tp, axis_link(cluster, mesh, "tp"))
    layer += exchange_s(shape, size, mesh, cluster, strategy)
    return shape.num_layers * layer + (mesh.pp - 1) * send_s(size, axis_link(cluster, mesh, "pp"))
