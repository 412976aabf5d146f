"""FLOP of a forward pass, and the weights that it reads."""

from __future__ import annotations

from functools import lru_cache

from hflow.plan.model_shape import Experts, ModelShape
from hflow.plan.parameters import active_parameters, parameters


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters by which a token is multiplied: all but the embedding table and the experts not chosen."""
    return active_parameters(shape) - (0 if shape.tied else shape.vocab * shape.hidden)


def kv_parameters(shape: ModelShape, without: frozenset[str] = frozenset()) -> int:
    """Of the projections to keys and values that ranks of tp may share, `without` some names."""
    return sum(p.size for p in parameters(shape) if p.kv_heads and p.name not in without)


@lru_cache(maxsize=4096)
def repeated_parameters(shape: ModelShape, tp: int) -> int:
    """Of the projections to keys and values what is on further ranks of tp than the first that has a head,
    counted once for each of them."""
    more = shape.kv_copies(tp) - 1
    return more * kv_parameters(shape) if more else 0


def head_parameters(shape: ModelShape) -> int:
    """The output matrix, which is the embedding table where the model is tied."""
    return shape.outputs * shape.hidden


def mlp_parameters(shape: ModelShape) -> int:
    """The matrices of one layer's MLP, which is gated, of a model without experts."""
    return 3 * shape.hidden * shape.ffn


def attention_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of queries by keys and of weights by values, over all layers."""
    widths = shape.query_width + shape.attended_width
    return 2 * widths * shape.seen(context) * shape.num_layers * tokens


def latent_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of the attention of new `tokens` to what is cached of latent attention: each head's query is taken
    to the width of the cached vector, and what it finds there back (arXiv:2405.04434, section 2.1.2). 0
    without latent attention, where a new token's attention is bound by memory."""
    if shape.latent is None:
        return 0.0
    widths = 2 * shape.latent.rank + shape.latent.rotary_dim
    return 2 * shape.num_heads * widths * context * shape.num_layers * tokens


def forward_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOP of a forward pass over `tokens` tokens that attend to `context` positions on average."""
    return 2 * matmul_parameters(shape) * tokens + attention_flops(shape, tokens, context)


def expert_parameters(shape: ModelShape) -> int:
    """Those of all experts of all layers."""
    if shape.moe is None:
        return 0
    return shape.expert_layers * shape.moe.num_experts * shape.moe.parameters_of_one(shape.hidden)


def read_parameters(shape: ModelShape, rows: float, ep: int = 1) -> float:
    """Parameters that one decoding step of `rows` rows reads: of experts those that any row chooses, if each
    chooses evenly and by itself. A device that holds one of `ep` parts of them serves the rows of `ep`
    replicas; what a group of tp reads counts as a whole, however its ranks share it."""
    if shape.moe is None:
        return matmul_parameters(shape)
    size = shape.moe.parameters_of_one(shape.hidden) * shape.expert_layers
    return matmul_parameters(shape) + (touched_experts(shape.moe, rows, ep) - shape.moe.top_k) * size


def touched_experts(experts: Experts, rows: float, ep: int = 1) -> float:
    """Of a layer's experts on a device, how many any of `rows` rows chooses; see `read_parameters`."""
    missed = (1 - experts.top_k / experts.num_experts) ** (rows * ep)
    return experts.num_experts / ep * (1 - missed)
