"""Bytes on one device: weights, training state, activations, KV cache.

Training in f32 keeps 16 bytes per parameter (weight, gradient, two Adam moments), in bf16 18 (bf16
weight; f32 gradient, master copy and moments). Activations per layer without recomputation are about
34·s·b·h bytes in half precision plus the attention scores, 5·a·s²·b (Korthikanti et al.,
arXiv:2205.05198); f32 doubles both.
"""

from __future__ import annotations

from hflow.compiler.cost.compute import BYTES
from hflow.compiler.layout import Mesh
from hflow.compiler.shape import ModelShape
from hflow.compiler.weights import stage_elements
from hflow.compiler.workload import Workload
from hflow.graph.graph import OpKind

TRAINING_BYTES = {"f32": 16, "bf16": 18}


def weight_bytes(shape: ModelShape, dtype: str, mesh: Mesh, trains: bool) -> int:
    """Weights of a model's shard, with gradients and optimizer state if it is trained there."""
    per_parameter = TRAINING_BYTES[dtype] if trains else BYTES[dtype]
    return stage_elements(shape, mesh.pp, mesh.tp) * per_parameter


def working_bytes(
    op: OpKind, shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int
) -> int:
    """What the node needs beside the weights while it runs."""
    if op == "generate":
        return _kv_cache_bytes(shape, dtype, work, mesh, micro_batch) + _logits_bytes(
            shape, micro_batch, mesh
        )
    activations = _layer_activation_bytes(shape, dtype, work.sequence, micro_batch, mesh)
    logits = _logits_bytes(shape, micro_batch * work.response, mesh)
    if op == "score":
        return activations + logits
    layers = shape.num_layers // mesh.pp
    in_flight = mesh.pp  # 1F1B: the first stage holds one micro-batch per stage
    return activations * layers * in_flight + 3 * logits


def _layer_activation_bytes(
    shape: ModelShape, dtype: str, sequence: int, micro_batch: int, mesh: Mesh
) -> int:
    tokens = micro_batch * sequence
    half_precision = tokens * (34 * shape.hidden + 5 * shape.num_heads * sequence)
    return int(half_precision * BYTES[dtype] / 2 / mesh.tp)


def _kv_cache_bytes(shape: ModelShape, dtype: str, work: Workload, mesh: Mesh, micro_batch: int) -> int:
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BYTES[dtype]
    return micro_batch * work.sequence * per_token // mesh.tp


def _logits_bytes(shape: ModelShape, tokens: int, mesh: Mesh) -> int:
    share = mesh.tp if shape.head == "lm" else 1  # one number per position is on every rank
    return tokens * shape.outputs * 4 // share
