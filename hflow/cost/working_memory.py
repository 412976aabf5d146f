"""What a node needs on one device beside weights while it runs: activations, KV cache, logits, gradients on
their way."""

from __future__ import annotations

from math import ceil

from hflow.cost.activation_memory import (
    forward_bytes,
    head_bytes,
    kv_cache_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    unread_activation_bytes,
)
from hflow.cost.context import context_bytes, predicted_tokens, rank_tokens, spares_last_mlp
from hflow.cost.device import BYTES
from hflow.cost.paged_cache import cache_tokens
from hflow.graph.ir import OpKind
from hflow.plan.flops import expert_parameters
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import num_parameters
from hflow.plan.pipeline_stages import largest_stage
from hflow.plan.scores import backward_scores_bytes, forward_scores_bytes
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload


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
    """What the node needs beside the weights while it runs, at the greatest lengths but for a KV cache
    that has pages.

    What a shared forward pass keeps is not among it (`kept_forward_bytes`).

    Args:
        untrained_layers: of a train node, the layers before the first weights that are trained.
    """
    needed = _working_bytes(op, shape, dtype, work, mesh, micro_batch, strategy, untrained_layers)
    if op == "train" and strategy.share_forward:
        needed -= _kept_bytes(shape, dtype, work, mesh, micro_batch, strategy, untrained_layers)
    return needed + routes_bytes(op, work, mesh, micro_batch, strategy)


def kept_forward_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, strategy: Strategy, untrained_layers: int = 0
) -> int:
    """What a forward pass that is shared keeps for the first update of a train node (`work`), all of whose
    micro-batches are there at once: activations, what the norm before the head reads, and what the head
    does."""
    rows = work.rows_per_update // mesh.dp
    read = ceil(rows * predicted_tokens(work.sequence, work.response, mesh)) * shape.hidden * BYTES[dtype]
    return _kept_bytes(shape, dtype, work, mesh, rows, strategy, untrained_layers) + 2 * read


def _kept_bytes(
    shape: ModelShape,
    dtype: str,
    work: Workload,
    mesh: Mesh,
    rows: int,
    strategy: Strategy,
    untrained_layers: int,
) -> int:
    """What the layers of a model without pipeline stages keep of so many rows until their backward pass."""
    layers = shape.num_layers - untrained_layers
    if strategy.recompute == "full":
        return layers * _input_bytes(shape, dtype, work, mesh, rows, strategy)
    unread = _unread_tokens(work, mesh, rows) if spares_last_mlp(shape, mesh, strategy) else 0
    layer = _layer_bytes(shape, dtype, work, mesh, rows, strategy)
    return layers * layer - unread_activation_bytes(shape, dtype, unread, mesh)


def _layer_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, rows: int, strategy: Strategy
) -> int:
    """What the backward pass of a layer needs of so many rows."""
    whole = rows * work.sequence
    layer = layer_activation_bytes(shape, dtype, rank_tokens(whole, mesh), mesh, strategy)
    if mesh.cp > 1:  # keys and values by row, in the place of this rank's
        layer += ceil(ceil(context_bytes(shape, dtype, whole, mesh)) * (1 - 1 / mesh.cp))
    return layer


def _input_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, rows: int, strategy: Strategy
) -> int:
    """What goes into a layer of so many rows."""
    tokens = rank_tokens(rows * work.sequence, mesh)
    return (ceil(tokens / mesh.tp) if strategy.sp else tokens) * shape.hidden * BYTES[dtype]


def _unread_tokens(work: Workload, mesh: Mesh, rows: int) -> int:
    """Of so many rows those that no head reads."""
    read = ceil(rows * predicted_tokens(work.sequence, work.response, mesh))
    return max(0, rank_tokens(rows * work.sequence, mesh) - read)


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
    tokens = rank_tokens(whole, mesh)
    scores = forward_scores_bytes(shape, dtype, micro_batch, work.sequence, mesh.tp, mesh.cp)
    states = tokens * shape.hidden * BYTES[dtype]
    layers = forward_bytes(shape, dtype, tokens, mesh, strategy, scores)
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
    stage, which has the most micro-batches in flight, and the last one, with what its head needs. Both count
    with the layers of the largest. Where the last layer holds less, the backward pass of the layer before it
    may hold most."""
    whole, layers = micro_batch * work.sequence, largest_stage(shape.num_layers, mesh.pp * strategy.vpp)
    layers -= untrained_layers if mesh.pp == 1 else 0  # later stages keep all of theirs
    tokens = rank_tokens(whole, mesh)
    of_rows = shape, dtype, work, mesh, micro_batch, strategy
    layer, inputs = _layer_bytes(*of_rows), _input_bytes(*of_rows)
    attended = backward_scores_bytes(shape, micro_batch, work.sequence, mesh.tp, mesh.cp)
    if mesh.cp > 1:  # keys and values by rank, and the gradients of both
        attended += 3 * ceil(context_bytes(shape, dtype, whole, mesh))
    live = layer_backward_bytes(shape, dtype, tokens, mesh, strategy, attended)
    if strategy.sp:
        live += 2 * tokens * shape.hidden * BYTES[dtype]  # gathered over tp, and the gradient of that
    each = inputs if strategy.recompute == "full" else layer
    head = head_bytes("train", shape, dtype, work, mesh, micro_batch)
    if spares_last_mlp(shape, mesh, strategy):
        unread = _unread_tokens(work, mesh, micro_batch)
        last = layer - unread_activation_bytes(shape, dtype, unread, mesh)
        of_last = last + layer_backward_bytes(shape, dtype, tokens, mesh, attended=attended, unread=unread)
        kept_last = inputs if strategy.recompute == "full" else last
        peak = (layers - 1) * each + max(of_last, kept_last + head)
        return max(peak, (layers - 2) * each + layer + live) + gathered_bytes(shape, dtype, mesh, strategy)
    kept, live = layers * each, live + layer - each
    if strategy.vpp > 1:  # what a chunk hands on is kept, too: of few layers, no small part
        handed_on = ceil(tokens / mesh.tp) if strategy.sp else tokens
        kept += handed_on * shape.hidden * BYTES[dtype]
    first_flight, last_flight = in_flight(micro_batches(work, mesh, micro_batch), mesh, strategy)
    last = last_flight * kept + max(live, head)
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


def gathered_bytes(shape: ModelShape, dtype: str, mesh: Mesh, strategy: Strategy) -> int:
    """The layer whose weights ZeRO-3 has gathered, and the next one, whose weights arrive meanwhile."""
    if strategy.zero != 3:
        return 0
    experts = expert_parameters(shape)
    held = num_parameters(shape) - experts + experts / strategy.sharing_replicas(mesh.tp)
    layer = held / shape.num_layers
    return 2 * ceil(layer / mesh.tp) * BYTES[dtype]


def _generation_bytes(
    shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, wave: int, strategy: Strategy
) -> int:
    """KV cache; the prompts' forward pass, or every row's logits, gathered over tp, and their float32 copy.
    Without a cache the forward pass is over all tokens."""
    logits = wave * shape.outputs * (BYTES[dtype] + 4)
    if not strategy.kv_cache:
        scores = forward_scores_bytes(shape, dtype, wave, work.sequence, mesh.tp)
        return max(forward_bytes(shape, dtype, wave * work.sequence, mesh, strategy, scores), logits)
    prompts = ceil(wave / work.samples_on_one(mesh.dp))
    scores = forward_scores_bytes(shape, dtype, prompts, work.prompt, mesh.tp)
    room = cache_tokens(work, mesh.dp, wave, strategy.engine)
    return kv_cache_bytes(shape, dtype, room, mesh) + max(
        forward_bytes(shape, dtype, prompts * work.prompt, mesh, strategy, scores), logits
    )
