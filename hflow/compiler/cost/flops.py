"""FLOP of a forward pass, and the weights that it reads."""

from __future__ import annotations

from hflow.compiler.shape import ModelShape


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters by which a token is multiplied: all but the embedding table and the experts not chosen."""
    return shape.active_parameters - (0 if shape.tied else shape.vocab * shape.hidden)


def head_parameters(shape: ModelShape) -> int:
    """The output matrix, which is the embedding table where the model is tied."""
    return shape.outputs * shape.hidden


def attention_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of queries by keys and of weights by values, over all layers."""
    return 4 * shape.num_heads * shape.head_dim * context * shape.num_layers * tokens


def forward_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of a forward pass over `tokens` tokens that attend to `context` positions on average."""
    return 2 * matmul_parameters(shape) * tokens + attention_flops(shape, tokens, context)


def read_parameters(shape: ModelShape, rows: float) -> float:
    """Parameters that one decoding step of `rows` rows reads: of experts those that any row chooses, if each
    chooses evenly and by itself."""
    if shape.moe is None:
        return matmul_parameters(shape)
    experts = shape.moe
    size = 3 * shape.hidden * experts.ffn * shape.num_layers
    missed = (1 - experts.top_k / experts.num_experts) ** rows
    touched = experts.num_experts * (1 - missed)
    return matmul_parameters(shape) + (touched - experts.top_k) * size
