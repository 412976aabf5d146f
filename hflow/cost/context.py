"""Which tokens of rows a rank runs, which it predicts, and what it gathers of those on others."""

from __future__ import annotations

from math import ceil

from hflow.cost.device import BYTES
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.strategy import Strategy


def context_bytes(shape: ModelShape, dtype: str, tokens: float, mesh: Mesh) -> float:
    """Keys and values of all `tokens` in one layer, as a rank has gathered them."""
    return tokens * ceil(shape.kv_width(mesh.tp) / mesh.tp) * BYTES[dtype]


def rank_tokens(tokens: int, mesh: Mesh) -> int:
    """Of so many tokens those that the fullest rank of cp runs."""
    return ceil(tokens / mesh.cp)


def spares_last_mlp(shape: ModelShape, mesh: Mesh, strategy: Strategy) -> bool:
    """Whether plans count that the last layer's MLP runs at those places alone that the head reads. It does
    not where ranks of sp have a part of the places each, with experts, or with an adapter that drops inputs;
    of several stages another one may take longest and hold most."""
    drops = shape.adapter is not None and bool(shape.adapter.dropout)
    return mesh.pp == 1 and not (strategy.sp or shape.moe or drops)


def predicted_tokens(sequence: float, response: float, mesh: Mesh) -> float:
    """Of a row of `sequence` tokens that ends with a response those that the fullest rank of cp predicts. A
    row is cut into twice as many parts as there are ranks, so one rank may have all of a short response."""
    if mesh.cp == 1:
        return response
    most = sequence / mesh.cp if response > sequence / 2 else sequence / (2 * mesh.cp)
    return min(response, most)
