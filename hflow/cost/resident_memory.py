"""Bytes on one device that stay from node to node: weights, gradients, optimizer, and a server's KV cache.

Training in f32 keeps 16 bytes per parameter (weight, gradient, two Adam moments), in bf16 18 (bf16
weight; f32 gradient, master copy and moments), of which ZeRO-1 splits the optimizer's 8 or 12 over dp and cp.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from hflow.cost.activation_memory import (
    kv_cache_bytes,
)
from hflow.cost.device import BYTES
from hflow.plan.engine_registry import profile_of
from hflow.plan.frozen import frozen_names
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.parameters import parameters, stage_elements
from hflow.plan.strategy import PLAIN, Strategy

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
    how = strategy.ep, fully_over, without, strategy.vpp, strategy.whole_experts
    return stage_elements(shape, mesh.pp, mesh.tp, *how)


def _trained_elements(shape: ModelShape, mesh: Mesh, strategy: Strategy, freeze: tuple[str, ...]) -> int:
    return _elements(shape, mesh, strategy, frozen_names(shape, freeze))


def pinned_bytes(shape: ModelShape, size_bytes: int, element_bytes: int, tp: int) -> int:
    """Of the host's memory, for `size_bytes` of a shard: torch rounds each block that it pins, one for each
    parameter, up to a power of two."""
    whole, rounded = _blocks_bytes(shape, element_bytes, tp)
    return ceil(size_bytes * rounded / whole)


@lru_cache(maxsize=4096)
def _blocks_bytes(shape: ModelShape, element_bytes: int, tp: int) -> tuple[int, int]:
    """Of a rank's part of all parameters, and of the blocks in which they are pinned."""
    shares = [element_bytes * ceil(p.size / p.parts(tp)) for p in parameters(shape)]
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
