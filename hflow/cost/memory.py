"""Bytes on one device: weights, training state, activations, KV cache, logits.

Training in f32 keeps 16 bytes per parameter (weight, gradient, two Adam moments), in bf16 18 (bf16
weight; f32 gradient, master copy and moments), of which ZeRO-1 splits the optimizer's 8 or 12 over dp and cp.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from hflow.cost.activation_memory import (
    forward_bytes,
    head_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
)
from hflow.cost.context import context_bytes, rank_tokens
from hflow.cost.device import BYTES
from hflow.graph.ir import OpKind
from hflow.plan.engine_registry import profile_of
from hflow.plan.flops import expert_parameters
from hflow.plan.frozen import frozen_names
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import num_parameters, parameters, stage_elements
from hflow.plan.scores import scores_bytes
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload

GRADIENT_BYTES = 4
TRAINED_BYTES = 12  # per parameter in a checkpoint: float32 weight and two moments
MOMENTS_BYTES = 8  # of these, the moments
AVERAGE_BYTES = 4  # per parameter and moving average, on the device and in a checkpoint: float32
OPTIMIZER_BYTES = {"f32": 8, "bf16": 12}  # two moments, and the master copy of bf16 weights


def resident_bytes(
    shape: ModelShape,
    dtype: str,
    mesh: Mesh,
    trains: bool,
    strategy: Strategy = PLAIN,
    freeze: tuple[str, ...] = (),
) -> int:
    """Weights of a model's shard, with gradients and optimizer state of what is trained there.

    Args:
        freeze: patterns of the names of parameters that are not trained. The stage with the most weights and
            that with the most to train need not be one, so that over several stages this is a bound.
    """
    elements = _elements(shape, mesh, strategy)
    if not trains:
        return elements * BYTES[dtype]
    gradients = _trained_elements(shape, mesh, strategy, freeze) * GRADIENT_BYTES
    return elements * BYTES[dtype] + gradients + optimizer_bytes(shape, dtype, mesh, strategy, freeze)


def optimizer_bytes(
    shape: ModelShape, dtype: str, mesh: Mesh, strategy: Strategy = PLAIN, freeze: tuple[str, ...] = ()
) -> int:
    """Adam's state on a device: what an offload between updates moves. ZeRO-1 splits that of experts over the
    ranks that have the same ones, so that each device has its part of the whole stage's."""
    if strategy.zero == 1:
        elements = stage_elements(
            shape, mesh.pp, mesh.tp, without=frozen_names(shape, freeze), vpp=strategy.vpp
        )
        return ceil(elements * OPTIMIZER_BYTES[dtype] / mesh.copies)
    return _trained_elements(shape, mesh, strategy, freeze) * OPTIMIZER_BYTES[dtype]


def average_bytes(shape: ModelShape, mesh: Mesh, strategy: Strategy = PLAIN) -> int:
    """One moving average of the weights of a trainer's shard."""
    return _elements(shape, mesh, strategy) * AVERAGE_BYTES


def snapshot_bytes(
    shape: ModelShape, mesh: Mesh, element_bytes: int, freeze: tuple[str, ...] = (), vpp: int = 1
) -> int:
    """What a device copies for a checkpoint of a model of which so many bytes are kept per parameter: the
    replicas of a shard share the writing, whoever holds the optimizer's state. Without parameters that match
    a pattern of `freeze`, or that an adapter leaves as they are."""
    elements = stage_elements(shape, mesh.pp, mesh.tp, without=frozen_names(shape, freeze), vpp=vpp)
    return ceil(elements * element_bytes / mesh.copies)


def _elements(
    shape: ModelShape, mesh: Mesh, strategy: Strategy, without: frozenset[str] = frozenset()
) -> int:
    """Weights on the fullest device, `without` some parameters."""
    fully_over = mesh.dp if strategy.zero == 3 else 1
    return stage_elements(shape, mesh.pp, mesh.tp, strategy.ep, fully_over, without, strategy.vpp)


def _trained_elements(shape: ModelShape, mesh: Mesh, strategy: Strategy, freeze: tuple[str, ...]) -> int:
    return _elements(shape, mesh, strategy, frozen_names(shape, freeze))


def working_bytes(
    op: OpKind,
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    strategy: Strategy = PLAIN,
    untrained_layers: int = 0,
) -> int:
    """What the node needs beside the weights while it runs, at the greatest lengths.

    Args:
        untrained_layers: of a train node, the layers before the first weights that are trained.
    """
    needed = _working_bytes(op, shape, dtype, work, mesh, micro_batch, strategy, untrained_layers)
    return needed + routes_bytes(op, work, mesh, micro_batch, strategy)


def routes_bytes(op: OpKind, work: Workload, mesh: Mesh, micro_batch: int, strategy: Strategy = PLAIN) -> int:
    """The experts of all tokens, int16, that a node tells or follows; with pipeline stages, of each
    micro-batch in flight."""
    count = micro_batches(work, mesh, micro_batch) if op == "train" else 1
    there = min(count, in_flight(count, mesh, strategy)[0])
    return there * micro_batch * work.sequence * work.choices * 2


def _working_bytes(
    op: OpKind,
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    strategy: Strategy,
    untrained_layers: int,
) -> int:
    if op == "generate":
        return _generation_bytes(shape, dtype, work, mesh, micro_batch, strategy)
    if op == "score":
        return _scoring_bytes(shape, dtype, work, mesh, micro_batch, strategy)
    return _training_bytes(shape, dtype, work, mesh, micro_batch, strategy, untrained_layers)


def _scoring_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int, strategy: Strategy
) -> int:
    """Of the layers, with what went into the first and into the present one, which Megatron still holds; or
    then of the head, with what came from the last."""
    whole = micro_batch * work.sequence
    tokens, scores = rank_tokens(whole, mesh), scores_bytes(shape, micro_batch, work.sequence, mesh.tp)
    states = tokens * shape.hidden * BYTES[dtype]
    layers = forward_bytes(shape, dtype, tokens, mesh, strategy.sp, scores)
    layers += 2 * ceil(states / mesh.tp) if strategy.sp else 2 * states
    if mesh.cp > 1:
        layers += ceil(2 * context_bytes(shape, dtype, whole, mesh))  # by rank, and by row
    head = 2 * states + head_bytes("score", shape, dtype, work, mesh, micro_batch)
    return max(layers, head) + gathered_bytes(shape, dtype, mesh, strategy)


def _training_bytes(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    micro_batch: int,
    strategy: Strategy,
    untrained_layers: int,
) -> int:
    """Working set only: weights, gradients and optimizer are in `resident_bytes`. The fuller of the first
    stage, which has the most micro-batches in flight, and the last one, with what its head needs."""
    whole, layers = micro_batch * work.sequence, shape.num_layers // (mesh.pp * strategy.vpp)
    layers -= untrained_layers if mesh.pp == 1 else 0  # later stages keep all of theirs
    tokens = rank_tokens(whole, mesh)
    layer = layer_activation_bytes(shape, dtype, tokens, mesh, strategy.sp)
    attended = scores_bytes(shape, micro_batch, work.sequence, mesh.tp)
    if mesh.cp > 1:
        context = ceil(context_bytes(shape, dtype, whole, mesh))
        layer += ceil(context * (1 - 1 / mesh.cp))  # keys and values by row, in the place of this rank's
        attended += 3 * context  # by rank, and the gradients of both
    live = layer_backward_bytes(shape, dtype, tokens, mesh, attended)
    if strategy.sp:
        live += 2 * tokens * shape.hidden * BYTES[dtype]  # gathered over tp, and the gradient of that
    kept = layers * layer
    if strategy.recompute == "full":
        inputs = (ceil(tokens / mesh.tp) if strategy.sp else tokens) * shape.hidden * BYTES[dtype]
        kept, live = layers * inputs, live + layer - inputs
    if strategy.vpp > 1:  # what a chunk hands on is kept, too: of few layers, no small part
        handed_on = ceil(tokens / mesh.tp) if strategy.sp else tokens
        kept += handed_on * shape.hidden * BYTES[dtype]
    first_flight, last_flight = in_flight(micro_batches(work, mesh, micro_batch), mesh, strategy)
    last = last_flight * kept + max(live, head_bytes("train", shape, dtype, work, mesh, micro_batch))
    return max(first_flight * kept + live, last) + gathered_bytes(shape, dtype, mesh, strategy)


def micro_batches(work: Workload, mesh: Mesh, micro_batch: int) -> int:
    """Of a replica, in an update."""
    return ceil(work.rows_per_update / mesh.dp / micro_batch)


def in_flight(micro_batches: int, mesh: Mesh, strategy: Strategy = PLAIN) -> tuple[int, int]:
    """How many passes of a micro-batch through a chunk of layers await their backward pass at most, on the
    first stage and on the last. 1F1B, with one chunk: a micro-batch per stage, and one. Interleaved, rank r
    of p with v chunks begins with 2 (p - r - 1) + (v - 1) p forward passes (as Megatron-LM schedules them),
    and does one more before the first backward pass."""
    most = micro_batches * strategy.vpp
    if strategy.vpp == 1:
        return min(mesh.pp, most), 1
    last = (strategy.vpp - 1) * mesh.pp + 1
    return min(last + 2 * (mesh.pp - 1), most), min(last, most)


def kv_cache_bytes(shape: ModelShape, dtype: str, tokens: int, mesh: Mesh) -> int:
    """Keys and values of `tokens` positions on one device."""
    return ceil(tokens * shape.kv_bytes_per_token(BYTES[dtype], mesh.tp) / mesh.pp)


def pinned_bytes(shape: ModelShape, size_bytes: int, element_bytes: int, tp: int) -> int:
    """Of the host's memory, for `size_bytes` of a shard: torch rounds each block that it pins, one for each
    parameter, up to a power of two."""
    whole, rounded = _blocks_bytes(shape, element_bytes, tp)
    return ceil(size_bytes * rounded / whole)


@lru_cache(maxsize=4096)
def _blocks_bytes(shape: ModelShape, element_bytes: int, tp: int) -> tuple[int, int]:
    """Of a rank's part of all parameters, and of the blocks in which they are pinned."""
    shares = [element_bytes * ceil(p.size / (1 if p.shard is None else tp)) for p in parameters(shape)]
    return sum(shares), sum(1 << (share - 1).bit_length() for share in shares)


def awake_bytes(
    shape: ModelShape, dtype: str, mesh: Mesh, tokens: int, platform: str, changes: bool, strategy: Strategy
) -> int:
    """What a server that does not sleep always keeps: weights and a KV cache of `tokens` positions; on a CPU,
    where they share the memory, also its processes and, if its weights ever change, the worker's copy of
    what does."""
    weights, server = resident_bytes(shape, dtype, mesh, False, strategy), profile_of(strategy.engine).server
    assert server, f"{strategy.engine} has no server"
    copy = renewed_bytes(shape, dtype, mesh, strategy) if changes else 0
    on_host = server.process_bytes + copy if platform == "cpu" else 0
    return weights + kv_cache_bytes(shape, dtype, tokens, mesh) + on_host


def renewed_bytes(shape: ModelShape, dtype: str, mesh: Mesh, strategy: Strategy) -> int:
    """Of a copy of a trained model's weights, what a renewal brings (`moved_parameters`)."""
    return _trained_elements(shape, mesh, strategy, ()) * BYTES[dtype]


def gathered_bytes(shape: ModelShape, dtype: str, mesh: Mesh, strategy: Strategy) -> int:
    """The layer whose weights ZeRO-3 has gathered, and the next one, whose weights arrive meanwhile."""
    if strategy.zero != 3:
        return 0
    experts = expert_parameters(shape)
    layer = (num_parameters(shape) - experts + experts / strategy.ep) / shape.num_layers
    return 2 * ceil(layer / mesh.tp) * BYTES[dtype]


def _generation_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, wave: int, strategy: Strategy
) -> int:
    """KV cache at the greatest lengths; the prompts' forward pass, or every row's logits, gathered over tp,
    and their float32 copy. Without a cache the forward pass is over all tokens."""
    logits = wave * shape.outputs * (BYTES[dtype] + 4)
    if not strategy.kv_cache:
        scores = scores_bytes(shape, wave, work.sequence, mesh.tp)
        return max(forward_bytes(shape, dtype, wave * work.sequence, mesh, scores=scores), logits)
    prompts = ceil(wave / work.samples)
    scores = scores_bytes(shape, prompts, work.prompt, mesh.tp)
    return kv_cache_bytes(shape, dtype, wave * work.sequence, mesh) + max(
        forward_bytes(shape, dtype, prompts * work.prompt, mesh, scores=scores), logits
    )
