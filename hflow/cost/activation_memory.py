"""Bytes that a pass over tokens holds on one device: activations, the head, and gradients on their way.

Activations are counted as in Korthikanti et al. (arXiv:2205.05198) for this decoder: without dropout, with
a gated MLP, and with fused attention (no matrix of scores).
"""

from __future__ import annotations

from math import ceil

from hflow.cost.context import predicted_tokens
from hflow.cost.device import BYTES
from hflow.graph.ir import OpKind
from hflow.plan.activations import forward_elements, routed_width
from hflow.plan.layout import Mesh
from hflow.plan.logits import COPIES_BYTES, LOGITS_BYTES, keeps_logits, outputs_per_position
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.plan.workload import Workload


def layer_activation_bytes(
    shape: ModelShape, dtype: str, tokens: int, mesh: Mesh, strategy: Strategy = PLAIN
) -> int:
    """What the backward pass of a layer needs. On every rank of tp: the inputs of its norms, of QKV and of
    the MLP, what latent attention makes Q, K and V of, before and after its norm, and the copies of a token
    that experts read and return. Split over tp: Q, K, V, attention's output by tokens and, of fused kernels,
    by rows, and gate, up and product of the MLP, whose activation is made again; and what goes into norms of
    queries and keys: Q, and all of QKV, of which K is a view. With `sp` the inputs are split, too, and so are
    the copies for whole experts."""
    qkv = shape.query_width + shape.kv_width(mesh.tp)
    outputs = 1 if shape.explicit_scores else 2
    split = qkv + outputs * shape.attended_width + 3 * shape.ffn
    split += shape.query_width + qkv if shape.qk_norm else 0
    inputs = (6 if shape.post_norms else 4) * shape.hidden
    inputs = ceil(inputs / mesh.tp) if strategy.sp else inputs
    whole = inputs + 2 * shape.latent_width + 2 * routed_width(shape, mesh, strategy.whole_experts)
    return tokens * (whole + ceil(split / mesh.tp)) * BYTES[dtype]


def unread_activation_bytes(shape: ModelShape, dtype: str, tokens: int, mesh: Mesh) -> int:
    """Of these what the MLP of the last layer and its norms need, which does not run at so many `tokens`."""
    inputs = (3 if shape.post_norms else 2) * shape.hidden
    return tokens * (inputs + ceil(3 * shape.ffn / mesh.tp)) * BYTES[dtype]


def layer_backward_bytes(
    shape: ModelShape,
    dtype: str,
    tokens: int,
    mesh: Mesh,
    strategy: Strategy = PLAIN,
    attended: int = 0,
    unread: int = 0,
) -> int:
    """The most that the backward pass of a layer holds beside what it needs: the gradient that came, and of
    the gated activation those of the product, of gate and of up, and the activation made again. Or of
    attention gradients, when what the MLP needed is gone, and `attended` bytes more. Or of the norm before
    the head two hidden states. With tp one more gradient is being summed, of which the collective lets go
    late. `unread`: so many of the tokens have passed through attention alone."""
    mlp, more, read = ceil(3 * shape.ffn / mesh.tp), 1 + (mesh.tp > 1), tokens - unread
    if shape.explicit_scores:
        attention = _explicit_gradients_bytes(shape, dtype, tokens, mesh, strategy)
    else:
        attention = _fused_gradients_bytes(shape, dtype, tokens, mesh)
    # Of these less is gone when attention's gradients are made.
    never_there = unread_activation_bytes(shape, dtype, unread, mesh)
    attention += never_there if shape.explicit_scores else unread * mlp * BYTES[dtype]
    gradient, rest = more * shape.hidden, max(mlp, 2 * shape.hidden)
    by_attention = tokens * gradient * BYTES[dtype] + attention + attended
    return max(by_attention, read * (gradient + rest) * BYTES[dtype])


def _fused_gradients_bytes(shape: ModelShape, dtype: str, tokens: int, mesh: Mesh) -> int:
    """By rows and by tokens, beside what the MLP needed: 4 of a query's width and 1.5 of a key's, as
    measured."""
    keys = shape.key_width * shape.kv_copies(mesh.tp)
    mlp, query, key = (ceil(width / mesh.tp) for width in (3 * shape.ffn, shape.query_width, keys))
    return tokens * (4 * query + ceil(1.5 * key) - mlp) * BYTES[dtype]


def _explicit_gradients_bytes(
    shape: ModelShape, dtype: str, tokens: int, mesh: Mesh, strategy: Strategy
) -> int:
    """While scores are made again: the gradient of what attention found, by rows, and the part of it that
    belongs to them, those of queries, and in float32 those of keys and values. Gone is what was needed behind
    attention: what it found by tokens, what the MLP and its norms read (half of a layer's inputs at least,
    `layer_activation_bytes`), and the copies that experts read and return."""
    inputs = (4 if shape.post_norms else 2) * shape.hidden
    inputs = ceil(inputs / mesh.tp) if strategy.sp else inputs
    split = ceil((3 * shape.ffn + shape.attended_width) / mesh.tp)
    routed = 2 * routed_width(shape, mesh, strategy.whole_experts)
    gone = tokens * (inputs + routed + split) * BYTES[dtype]
    found = tokens * ceil((2 * shape.attended_width + shape.query_width) / mesh.tp) * BYTES[dtype]
    return found + tokens * ceil(shape.kv_width(mesh.tp) / mesh.tp) * 4 - gone


def forward_bytes(
    shape: ModelShape, dtype: str, tokens: int, mesh: Mesh, strategy: Strategy = PLAIN, scores: int = 0
) -> int:
    """The most that a forward pass holds at once on a device, with so many bytes of `scores`."""
    elements = ceil(scores / BYTES[dtype])
    return forward_elements(shape, tokens, mesh, strategy.sp, elements, strategy.whole_experts) * BYTES[dtype]


def head_bytes(
    op: OpKind, shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int
) -> int:
    """Of the head, for the response tokens: logits that are kept with two float32 copies and, in training,
    their gradient. Or a tile of copies, the hidden states that predict and their gradient, in float32 and in
    the model's format, which grow with the tokens and not with the vocabulary."""
    tokens = ceil(micro_batch * predicted_tokens(work.sequence, work.response, mesh))
    width = outputs_per_position(shape, mesh)
    kept, trains = kept_bytes(dtype, work, micro_batch), op == "train"
    if shape.head == "scalar" or keeps_logits(tokens, width):
        return tokens * width * (BYTES[dtype] * (1 + trains) + COPIES_BYTES) + kept
    own = BYTES[dtype] + trains * (4 + (BYTES[dtype] if dtype != "f32" else 0))
    return LOGITS_BYTES + tokens * shape.hidden * own + kept


def kept_bytes(dtype: str, work: Workload, micro_batch: int) -> int:
    """Beside the logits, for log-probs over kept sets: ids and places of the tokens, int64, and their logits
    with a gradient."""
    return micro_batch * work.response * work.kept * (16 + 2 * BYTES[dtype])


def kv_cache_bytes(shape: ModelShape, dtype: str, tokens: int, mesh: Mesh) -> int:
    """Keys and values of `tokens` positions on one device."""
    return ceil(tokens * shape.kv_bytes_per_token(BYTES[dtype], mesh.tp) / mesh.pp)
