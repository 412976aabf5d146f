"""Time of generate, score and train nodes on a mesh.

A forward pass costs 2N FLOP per token plus attention; training three times that, four times with full
recomputation (Megatron-LM, arXiv:2104.04473). A pipeline of p stages and m micro-batches takes
(m + p - 1) slots (1F1B) of its slowest stage: the last, which also has the head. For generation see
`generation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from hflow.cost.comm import all_gather_s, all_reduce_s, axis_link, send_s
from hflow.cost.device import (
    BYTES,
    attention_work,
    device_of,
    layer_latency_s,
    products_s,
    residual_s,
    stream_s,
)
from hflow.cost.experts import exchange_s, expert_replicas
from hflow.cost.generation import generate_s
from hflow.graph.ir import OpKind
from hflow.plan.cluster import Cluster
from hflow.plan.flops import (
    expert_parameters,
    head_parameters,
    matmul_parameters,
    read_parameters,
)
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import num_parameters
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

ADAM_BYTES = 32  # per parameter: reads and writes of weight, gradient and two moments in float32


def node_time_s(
    op: OpKind,
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """Seconds that one execution of the node takes on `mesh`, in passes of `micro_batch` rows per replica."""
    if op == "generate":
        return generate_s(shape, dtype, work, mesh, micro_batch, cluster, strategy)
    if op == "train":
        passes = train_passes_s(shape, dtype, work, mesh, micro_batch, cluster, strategy)
        return work.optimizer_steps * (passes + update_s(shape, dtype, mesh, cluster, strategy))
    micro_batches = ceil(work.rows / mesh.dp / micro_batch)
    stage = _Stage(shape, dtype, work, mesh, micro_batch, cluster, strategy)
    slot = stage.layers_s("score") + stage.head_s("score") + stage.messages_s() + stage.hop_s()
    slot += gather_s(shape, dtype, mesh, cluster, strategy)
    return (micro_batches + mesh.pp - 1) * slot


def train_passes_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
) -> float:
    """Forward and backward passes over the rows of one update, without the update."""
    micro_batches = ceil(work.rows_per_update / mesh.dp / micro_batch)
    again = 1 if strategy.recompute == "full" else 0
    stage = _Stage(shape, dtype, work, mesh, micro_batch, cluster, strategy)
    slot = (3 + again) * stage.layers_s("train") + 3 * stage.head_s("train")
    slot += (2 + again) * stage.messages_s() + 2 * stage.hop_s()
    slot += 3 * gather_s(shape, dtype, mesh, cluster, strategy)  # the third scatters gradients
    return (micro_batches + mesh.pp - 1) * slot


@lru_cache(maxsize=4096)
def update_s(
    shape: ModelShape, dtype: str, mesh: Mesh, cluster: Cluster, strategy: Strategy = PLAIN
) -> float:
    """Float32 gradients are reduced over dp (those of experts over the ranks that have the same ones), then
    Adam updates what a device owns. ZeRO-1 scatters the gradients and gathers the weights afterwards; ZeRO-3
    has moved both in the passes."""
    common, experts = _local_parameters(shape, mesh, strategy)
    owned = common + experts
    if strategy.zero:
        owned = num_parameters(shape) / len(mesh.devices)
    adam = stream_s(ADAM_BYTES * owned, device_of(cluster, mesh))
    if strategy.zero == 3:
        return adam
    seconds = adam + _reduce_s(common, dtype, mesh, cluster, strategy)
    if experts:
        seconds += _reduce_s(experts, dtype, expert_replicas(mesh, strategy.ep), cluster, strategy)
    return seconds


def gather_s(shape: ModelShape, dtype: str, mesh: Mesh, cluster: Cluster, strategy: Strategy) -> float:
    """All weights of a device's stage, where ZeRO-3 splits them over dp. Prefetching hides little of it: the
    measured training throughput (benchmarks/cost_model.py) is predicted best as if it hid nothing."""
    if strategy.zero != 3:
        return 0.0
    common, experts = _local_parameters(shape, mesh, strategy)
    seconds = all_gather_s(common * BYTES[dtype], mesh.dp, axis_link(cluster, mesh, "dp"))
    if not experts:
        return seconds
    replicas = expert_replicas(mesh, strategy.ep)
    return seconds + all_gather_s(experts * BYTES[dtype], replicas.dp, axis_link(cluster, replicas, "dp"))


def _local_parameters(shape: ModelShape, mesh: Mesh, strategy: Strategy) -> tuple[float, float]:
    """Of a device, on average over stages: what every rank of dp has, and its experts."""
    experts, parts = expert_parameters(shape), mesh.pp * mesh.tp
    return (num_parameters(shape) - experts) / parts, experts / parts / strategy.ep


def _reduce_s(parameters: float, dtype: str, mesh: Mesh, cluster: Cluster, strategy: Strategy) -> float:
    link = axis_link(cluster, mesh, "dp")
    if strategy.zero == 1:
        return all_gather_s((4 + BYTES[dtype]) * parameters, mesh.dp, link)
    return all_reduce_s(4 * parameters, mesh.dp, link)


@dataclass(frozen=True)
class _Stage:
    """The last pipeline stage and one micro-batch that passes through it."""

    shape: ModelShape
    dtype: str
    work: Workload
    mesh: Mesh
    micro_batch: int
    cluster: Cluster
    strategy: Strategy

    @cached_property
    def tokens(self) -> float:
        return self.micro_batch * self.work.mean_sequence

    @cached_property
    def activation_bytes(self) -> float:
        return self.tokens * self.shape.hidden * BYTES[self.dtype]

    def layers_s(self, kind: Literal["train", "score"]) -> float:
        """The layers' forward pass, without communication."""
        shape, device = self.shape, device_of(self.cluster, self.mesh)
        parameters = read_parameters(shape, self.tokens, self.strategy.ep) - head_parameters(shape)
        flops = 2 * (matmul_parameters(shape) - head_parameters(shape)) * self.tokens
        flops += attention_work(shape, self.tokens, self.work.mean_sequence / 2)
        seconds = products_s(flops, parameters, kind, self.dtype, device, self.mesh.tp)
        seconds += residual_s(shape, self.tokens, self.dtype, device)
        return (seconds + shape.num_layers * layer_latency_s(device)) / self.mesh.pp

    def head_s(self, kind: Literal["train", "score"]) -> float:
        parameters, device = head_parameters(self.shape), device_of(self.cluster, self.mesh)
        return products_s(2 * parameters * self.tokens, parameters, kind, self.dtype, device, self.mesh.tp)

    def messages_s(self) -> float:
        """Of each layer, in one direction: two all-reduces over tp, and the way to the experts and back."""
        link = axis_link(self.cluster, self.mesh, "tp")
        seconds = 2 * all_reduce_s(self.activation_bytes, self.mesh.tp, link)
        seconds += exchange_s(self.shape, self.activation_bytes, self.mesh, self.cluster, self.strategy)
        return seconds * self.shape.num_layers / self.mesh.pp

    def hop_s(self) -> float:
        """The activations on their way to the next stage."""
        if self.mesh.pp == 1:
            return 0.0
        return send_s(self.activation_bytes, axis_link(self.cluster, self.mesh, "pp"))
