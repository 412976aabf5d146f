"""Time of generate, score and train nodes on a mesh.

A forward pass costs 2N FLOP per token plus attention; training three times that, four times with full
recomputation (Megatron-LM, arXiv:2104.04473), as in the head where its logits are not kept. A pipeline of p
stages and m micro-batches takes (m + p - 1) slots (1F1B) of its slowest stage: the last, which also has the
head, or one with more layers. With v chunks of layers on each rank, interleaved, training takes m + (p - 1) /
v slots with v times the messages between stages (arXiv:2104.04473, section 2.2). For generation see
`generation.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal

from hflow.cost.attention import seen_by_rows
from hflow.cost.comm import all_gather_s, all_reduce_s, axis_link
from hflow.cost.context import predicted_tokens, spares_last_mlp
from hflow.cost.device import (
    BYTES,
    attention_work,
    device_of,
    layer_latency_s,
    products_s,
    residual_s,
    stream_s,
)
from hflow.cost.dropout import masks_s
from hflow.cost.execution import Execution
from hflow.cost.experts import copies_s, expert_replicas, padding_flops
from hflow.cost.generation import generate_s
from hflow.cost.passes import MicroBatches, passes
from hflow.graph.ir import OpKind
from hflow.plan.cluster import Cluster
from hflow.plan.flops import (
    expert_parameters,
    head_parameters,
    kv_parameters,
    matmul_parameters,
    mlp_parameters,
    read_parameters,
    repeated_parameters,
)
from hflow.plan.frozen import frozen_names, trained_share
from hflow.plan.layout import Mesh
from hflow.plan.logits import keeps_logits, outputs_per_position
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import EMBEDDING, LM_HEAD, SCALAR_HEAD, num_parameters, parameters
from hflow.plan.pipeline_stages import stage_sizes
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

AVERAGED_BYTES = 12  # per parameter: reads of average and weight, write of the average, in float32
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
    run = Execution(shape, dtype, work, mesh, micro_batch, cluster, strategy)
    if op == "generate":
        return generate_s(run)
    if op == "train":
        update = update_s(shape, dtype, mesh, cluster, strategy, work.freeze)
        shared = shared_forward_s(run) if strategy.share_forward else 0.0
        passes_s = _train_passes_s(shape, dtype, work, mesh, micro_batch, cluster, strategy.of_passes)
        return work.optimizer_steps * (passes_s + update) - shared
    parts = _micro_batches(run, trains=False)
    tokens = _tokens(run, parts)
    inside, head = _layers_s(run, parts, "score"), _head_s(run, parts, "score")
    messages_s = run.messages_s(tokens) / mesh.pp
    slot = inside + head + run.end_messages_s(tokens, _predicted(run, parts), gradients=False)
    slot += messages_s + run.hop_s(tokens)
    slot += gather_s(shape, dtype, mesh, cluster, strategy) + _uneven_s(run, inside + messages_s, head)
    return (parts.count + mesh.pp - 1) * slot


@lru_cache(maxsize=4096)
def _train_passes_s(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    cluster: Cluster,
    strategy: Strategy,
) -> float:
    return train_passes_s(Execution(shape, dtype, work, mesh, micro_batch, cluster, strategy))


def train_passes_s(run: Execution) -> float:
    """Forward and backward passes over the rows of one update, without the update."""
    again, parts = 1 if run.strategy.recompute == "full" else 0, _micro_batches(run, trains=True)
    tokens = _tokens(run, parts)
    layers, head = _trained_parts(run.shape, run.work.freeze)
    inside = (2 + layers + again) * _layers_s(run, parts, "train")
    of_head = (2 + head) * _head_s(run, parts, "train")
    slot = inside + of_head
    of_head += _remade_logits_s(run, parts)
    slot += _remade_logits_s(run, parts) + _count_s(run, parts) + (2 + again) * masks_s(run, tokens)
    messages_s = (2 + again) * run.messages_s(tokens) + run.regathered_s(tokens)
    slot += messages_s / run.mesh.pp + 2 * run.strategy.vpp * run.hop_s(tokens)
    slot += run.end_messages_s(tokens, _predicted(run, parts), gradients=True)
    inside += _count_s(run, parts) + (2 + again) * masks_s(run, tokens) + messages_s / run.mesh.pp
    slot += _uneven_s(run, inside, of_head)
    # The third gather scatters gradients.
    slot += 3 * gather_s(run.shape, run.dtype, run.mesh, run.cluster, run.strategy)
    return (parts.count + (run.mesh.pp - 1) / run.strategy.vpp) * slot


def shared_forward_s(run: Execution) -> float:
    """What the first update saves where a score node has made its forward pass through the layers. The head
    runs again."""
    parts = _micro_batches(run, trains=True)
    return parts.count * (_layers_s(run, parts, "train") + run.messages_s(_tokens(run, parts)))


def _uneven_s(run: Execution, inside: float, head: float) -> float:
    """What a slot takes longer where stages have unequal numbers of layers.

    Args:
        inside: seconds of the layers of a stage, if all had equally many.
        head: seconds of the head, which the last stage has.
    """
    sizes = stage_sizes(run.shape.num_layers, run.mesh.pp)
    most, last = (size * run.mesh.pp / run.shape.num_layers - 1 for size in (max(sizes), sizes[-1]))
    return max(inside * most - head, inside * last)


def _count_s(run: Execution, parts: MicroBatches) -> float:
    """A forward pass of a micro-batch through the layers of a stage, where choices of experts are counted."""
    if not run.work.counts_choices:
        return 0.0
    tokens = _tokens(run, parts)
    messages_s = run.messages_s(tokens) / run.mesh.pp + run.strategy.vpp * run.hop_s(tokens)
    return _layers_s(run, parts, "score") + messages_s


@lru_cache(maxsize=256)
def _trained_parts(shape: ModelShape, freeze: tuple[str, ...]) -> tuple[float, float]:
    """What part of the layers' parameters, and of the head's, has gradients: a third of the work of training
    them. The gradients of what enters a frozen layer count as if something before it were trained."""
    frozen = frozen_names(shape, freeze)
    inside = [p for p in parameters(shape) if p.layer is not None]
    held = sum(p.size for p in inside if p.name in frozen)
    head = EMBEDDING if shape.tied else SCALAR_HEAD if shape.head == "scalar" else LM_HEAD
    return 1 - held / sum(p.size for p in inside), float(head not in frozen)


def _micro_batches(run: Execution, trains: bool) -> MicroBatches:
    whole = run.cluster.whole_rows
    return passes(run.work, run.mesh.dp, run.micro_batch, run.shape.head, run.mesh.pp > 1, trains, whole)


def _tokens(run: Execution, parts: MicroBatches) -> float:
    """Of a micro-batch, on one rank of cp."""
    return parts.tokens / run.mesh.cp if run.mesh.cp > 1 else parts.tokens


def _predicted(run: Execution, parts: MicroBatches) -> float:
    """Tokens of a micro-batch that the fullest rank of cp predicts: those of responses."""
    return parts.rows * predicted_tokens(run.work.mean_sequence, run.work.mean_response, run.mesh)


def _layers_s(run: Execution, parts: MicroBatches, kind: Literal["train", "score"]) -> float:
    """The forward pass of a micro-batch through the layers of a stage, without communication."""
    shape, device, tokens = run.shape, run.device, _tokens(run, parts)
    repeated, head = repeated_parameters(shape, run.mesh.tp), head_parameters(shape)
    sharing = run.strategy.sharing_replicas(run.mesh.tp)
    parameters = read_parameters(shape, tokens, sharing) + repeated - head
    flops = 2 * (matmul_parameters(shape) + repeated - head) * tokens - _unread_flops(run, parts, tokens)
    flops += attention_work(shape, *seen_by_rows(run, parts))
    flops += padding_flops(shape, tokens, sharing, device)
    seconds = products_s(flops, parameters, kind, run.dtype, device, run.mesh.tp)
    between = tokens / run.mesh.tp if run.strategy.sp else tokens  # what norms and residual sums are made of
    seconds += residual_s(shape, between, run.dtype, device) + copies_s(shape, tokens, run.dtype, device)
    return (seconds + shape.num_layers * layer_latency_s(device, kind)) / run.mesh.pp


def _unread_flops(run: Execution, parts: MicroBatches, tokens: float) -> float:
    """Of the last layer's MLP, at places that the head does not read."""
    if run.cluster.whole_rows or not spares_last_mlp(run.shape, run.mesh, run.strategy):
        return 0.0
    return 2 * mlp_parameters(run.shape) * max(tokens - _predicted(run, parts), 0.0)


def _head_s(run: Execution, parts: MicroBatches, kind: Literal["train", "score"]) -> float:
    """The forward pass of a micro-batch through the head, which the last stage has."""
    tokens = _tokens(run, parts) if run.cluster.whole_rows else _predicted(run, parts)
    return _products_of_head_s(run, tokens, kind)


def _products_of_head_s(run: Execution, tokens: float, kind: Literal["train", "score"]) -> float:
    parameters = head_parameters(run.shape)
    return products_s(2 * parameters * tokens, parameters, kind, run.dtype, run.device, run.mesh.tp)


def _remade_logits_s(run: Execution, parts: MicroBatches) -> float:
    """Of a micro-batch: the backward pass multiplies by the head once more where its logits, which response
    tokens alone have, are not kept; of kept sets those that count always are."""
    tokens, width = _predicted(run, parts), outputs_per_position(run.shape, run.mesh)
    if run.shape.head == "scalar" or run.work.kept or keeps_logits(ceil(tokens), width):
        return 0.0
    return _products_of_head_s(run, tokens, "train")


@lru_cache(maxsize=4096)
def update_s(
    shape: ModelShape,
    dtype: str,
    mesh: Mesh,
    cluster: Cluster,
    strategy: Strategy = PLAIN,
    freeze: tuple[str, ...] = (),
) -> float:
    """Float32 gradients are reduced over dp and cp (those of experts over the ranks that have the same ones),
    then Adam updates what a device owns. ZeRO-1 scatters the gradients and gathers the weights afterwards;
    ZeRO-3 has moved both in the passes. Ranks of tp with the same key-value head sum its gradients. All of it
    is for parameters that are trained, wherever they are."""
    share = trained_share(shape, freeze) if freeze or shape.adapter else 1
    common, experts = (share * part for part in _local_parameters(shape, mesh, strategy))
    owned = common + experts
    if strategy.zero:
        owned = share * _held_parameters(shape, mesh) / len(mesh.devices)
    adam = stream_s(ADAM_BYTES * owned, device_of(cluster, mesh))
    if strategy.zero == 3:
        return adam
    seconds = adam + _reduce_s(common, dtype, mesh, cluster, strategy)
    if experts:
        seconds += _reduce_s(experts, dtype, expert_replicas(mesh, strategy), cluster, strategy)
    if (copies := shape.kv_copies(mesh.tp)) > 1:
        held = copies * kv_parameters(shape, frozen_names(shape, freeze)) / (mesh.pp * mesh.tp)
        seconds += all_reduce_s(4 * held, copies, axis_link(cluster, mesh, "tp"))
    return seconds


def average_s(shape: ModelShape, mesh: Mesh, cluster: Cluster) -> float:
    """Of moving an average of the weights on: the average is read and written, and the weights read."""
    parameters = _held_parameters(shape, mesh) / (mesh.pp * mesh.tp)
    return stream_s(AVERAGED_BYTES * parameters, device_of(cluster, mesh))


def gather_s(shape: ModelShape, dtype: str, mesh: Mesh, cluster: Cluster, strategy: Strategy) -> float:
    """All weights of a device's stage, where ZeRO-3 splits them over dp. Prefetching hides little of it: the
    measured training throughput (benchmarks/cost_model.py) is predicted best as if it hid nothing."""
    if strategy.zero != 3:
        return 0.0
    common, experts = _local_parameters(shape, mesh, strategy)
    seconds = all_gather_s(common * BYTES[dtype], mesh.dp, axis_link(cluster, mesh, "dp"))
    if not experts:
        return seconds
    replicas = expert_replicas(mesh, strategy)
    return seconds + all_gather_s(experts * BYTES[dtype], replicas.dp, axis_link(cluster, replicas, "dp"))


def _local_parameters(shape: ModelShape, mesh: Mesh, strategy: Strategy) -> tuple[float, float]:
    """Of a device, on average over stages: what every rank of dp has, and its experts."""
    experts, parts = expert_parameters(shape), mesh.pp * mesh.tp
    common = _held_parameters(shape, mesh) - experts
    return common / parts, experts / parts / strategy.sharing_replicas(mesh.tp)


def _held_parameters(shape: ModelShape, mesh: Mesh) -> int:
    """Of all devices of a replica together."""
    return num_parameters(shape) + repeated_parameters(shape, mesh.tp)


def _reduce_s(parameters: float, dtype: str, mesh: Mesh, cluster: Cluster, strategy: Strategy) -> float:
    link = axis_link(cluster, mesh, "dp_cp")
    if strategy.zero == 1:
        return all_gather_s((4 + BYTES[dtype]) * parameters, mesh.copies, link)
    return all_reduce_s(4 * parameters, mesh.copies, link)
