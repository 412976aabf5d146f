"""From a model's shape and a mesh to this rank's part of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from hflow.graph.ir import WeightDType
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.pipeline_stages import stage_chunks, stage_sizes
from hflow.runtime.engines.groups import Groups
from hflow.runtime.engines.megatron import present_device
from hflow.runtime.engines.megatron.adapter import add_adapters
from hflow.runtime.engines.megatron.attention import FusedAttention
from hflow.runtime.engines.megatron.collection import collection
from hflow.runtime.engines.megatron.embedding import ScaledEmbedding
from hflow.runtime.engines.megatron.explicit_attention import ExplicitAttention
from hflow.runtime.engines.megatron.gated import GeGLU, SwiGLU
from hflow.runtime.engines.megatron.head import replace_output_layer
from hflow.runtime.engines.megatron.interleaved import Interleaved
from hflow.runtime.engines.megatron.last_layer import LastLayer
from hflow.runtime.engines.megatron.moe.layer import MixtureOfExperts
from hflow.runtime.engines.megatron.norm import NormedResidual, OffsetRMSNorm, RMSNorm
from hflow.runtime.engines.megatron.recompute import RecomputingLayer
from hflow.runtime.engines.megatron.shaped_config import ShapedConfig

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


GATES = {"silu": SwiGLU, "gelu_tanh": GeGLU}


def build_model(
    shape: ModelShape,
    mesh: Mesh,
    dtype: WeightDType,
    groups: Groups,
    device: torch.device,
) -> GPTModel:
    """This rank's layers of the model, with undefined weights, on the plan's `device`.

    The model takes tokens ``[rows, seq]`` and returns, on the last pipeline stage, the normed hidden states
    ``[rows, seq, hidden]``, whose logits `OutputMatrix` makes, or, with a scalar head, values
    ``[rows, seq, 1]``; on the others, hidden states ``[seq, rows, hidden]``.
    """
    return _build(_prepared(shape, mesh, dtype, groups, device), device)


def build_chunks(
    shape: ModelShape,
    mesh: Mesh,
    dtype: WeightDType,
    groups: Groups,
    device: torch.device,
    vpp: int,
) -> Interleaved:
    """This rank's layers as `vpp` > 1 chunks, each of which is as `build_model` says: the first chunk of the
    first stage takes tokens, and the last one of the last stage has the head."""
    config = _prepared(shape, mesh, dtype, groups, device, vpp)
    return Interleaved([_build(config, device, chunk) for chunk in range(vpp)])


def _prepared(
    shape: ModelShape,
    mesh: Mesh,
    dtype: WeightDType,
    groups: Groups,
    device: torch.device,
    vpp: int | None = None,
) -> ShapedConfig:
    """The configuration, with Megatron made ready to build on `device`."""
    present_device.work_on(device)
    # No layer draws from torch's random numbers: their states need no care, and this tracker takes none.
    initialize_rng_tracker(inference_rng_tracker=True)
    return _config(shape, mesh, DTYPES[dtype], groups, vpp)


def _build(config: ShapedConfig, device: torch.device, chunk: int | None = None) -> GPTModel:
    """A stage, or chunk number `chunk` of it."""
    shape, groups = config.shape, config.groups
    chunks = config.virtual_pipeline_model_parallel_size or 1
    takes_tokens = groups.first_stage and not chunk
    has_head = groups.last_stage and chunk in (None, chunks - 1)
    pp = config.pipeline_model_parallel_size
    own = stage_chunks(shape.num_layers, pp, groups.pp.rank(), chunks)
    model = GPTModel(
        config,
        _layers(len(own[chunk or 0]), config, has_head),
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        pre_process=takes_tokens,
        post_process=has_head,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # attention turns queries and keys itself
        pg_collection=collection(groups),
        vp_stage=chunk,
    )
    if takes_tokens and shape.scaled_embedding:
        model.embedding.__class__ = ScaledEmbedding  # Megatron lets nobody choose its class
    if has_head:
        replace_output_layer(model, shape.head == "scalar")
    add_adapters(model, shape, groups.tp)
    # Megatron makes the large parameters on the present device, and leaves the norms on the CPU.
    return model.to(device)


def _config(
    shape: ModelShape, mesh: Mesh, dtype: torch.dtype, groups: Groups, vpp: int | None
) -> ShapedConfig:
    keep = lambda weight: weight  # noqa: E731  (weights are loaded, not drawn)
    sizes = stage_sizes(shape.num_layers, mesh.pp)
    uneven = len({*sizes}) > 1
    return ShapedConfig(
        shape=shape,
        groups=groups,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        # Of a head that several ranks have, each has a group with some of its queries.
        num_query_groups=shape.num_kv_heads * shape.kv_copies(mesh.tp),
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=True,  # a module of the layer's, here one of `GATES`
        add_bias_linear=shape.output_bias,  # of dense layers none but attention's has one
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,  # their gradients are summed over tp, whose ranks have other heads
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=keep,
        output_layer_init_method=keep,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=sizes[0] if uneven else None,
        num_layers_in_last_pipeline_stage=sizes[-1] if uneven else None,
        # Of two ranks each is both neighbours of the other, which only messages that are sent one by one
        # tell apart.
        batch_p2p_comm=vpp is None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss that hflow hands over is already normalised over all ranks and micro-batches:
        # with this, Megatron only adds up, and divides by nothing.
        calculate_per_token_loss=True,
        # The fused kernels below need Apex or TransformerEngine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


def _layers(count: int, config: ShapedConfig, has_head: bool) -> Any:
    """Of a stage or chunk."""
    shape = config.shape
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    # Megatron takes classes too, but declares only specifications of modules
    norm: Any = OffsetRMSNorm if shape.offset_norms else RMSNorm
    parts: Any = layer.submodules
    parts.input_layernorm = norm
    parts.pre_mlp_layernorm = norm
    attention: Any = parts.self_attention.submodules
    attention.core_attention = ExplicitAttention if shape.explicit_scores else FusedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.post_norms:
        added = ModuleSpec(NormedResidual, params={"config": config, "norm": norm})
        parts.self_attn_bda = parts.mlp_bda = added
    if shape.moe:
        parts.mlp = MixtureOfExperts
    else:
        parts.mlp.submodules.activation_func = GATES[shape.activation]
    layer.module = RecomputingLayer
    layers = [layer] * count
    if has_head:
        layers[-1] = replace(layer, module=LastLayer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
