"""A built layer's weights, as the kernels take them that decode few rows on CPUs (`cpu_kernels.layer`)."""

from __future__ import annotations

from typing import Any

from hflow.plan.model_shape import ModelShape
from hflow.runtime.engines.megatron.cpu_kernels.layer import AttentionBlock, MlpBlock, NormWeight


def attention_block(layer: Any, number: int, shape: ModelShape, groups: int) -> AttentionBlock | None:
    """Of a layer with so many key-value heads here; None: adapters change its projections."""
    if shape.adapter:
        return None
    attention = layer.self_attention
    qkv, out = attention.linear_qkv, attention.linear_proj
    norms = (attention.q_layernorm.weight, attention.k_layernorm.weight) if shape.qk_norm else None
    sinks = attention.core_attention.sinks.float() if shape.sinks else None
    return AttentionBlock(
        _norm(layer.input_layernorm, shape),
        qkv.weight,
        qkv.bias,
        norms,
        out.weight,
        groups,
        out.weight.shape[1] // shape.head_dim // groups,
        shape.query_factor,
        shape.attention_cap,
        sinks,
        shape.window_of(number),
    )


def mlp_block(layer: Any, shape: ModelShape) -> MlpBlock | None:
    """None of experts, and where adapters change its projections."""
    if shape.adapter or shape.moe:
        return None
    mlp = layer.mlp
    norm = _norm(layer.pre_mlp_layernorm, shape)
    return MlpBlock(norm, mlp.linear_fc1.weight, mlp.linear_fc2.weight, shape.activation)


def _norm(module: Any, shape: ModelShape) -> NormWeight:
    return NormWeight(module.weight, module.eps or 0.0, int(shape.offset_norms))
