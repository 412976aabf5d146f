"""How much a forward pass holds on a device, in numbers of elements."""

from __future__ import annotations

from math import ceil

from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape


def forward_elements(shape: ModelShape, tokens: int, mesh: Mesh, sp: bool = False, scores: int = 0) -> int:
    """The most that a forward pass holds on a device: residual, norm's output, and attention, with so many
    elements of its `scores`, or MLP. With sequence parallelism (`sp`), parts of the former two, and what a
    product has gathered of the latter."""
    attention = shape.query_width + shape.kv_width(mesh.tp) + shape.attended_width
    mlp = ceil(3 * shape.ffn / mesh.tp) + 2 * routed_width(shape)
    attention = tokens * (ceil(attention / mesh.tp) + shape.latent_width) + scores
    between = shape.hidden + ceil(2 * shape.hidden / mesh.tp) if sp else 2 * shape.hidden
    return tokens * between + max(attention, tokens * mlp)


def routed_width(shape: ModelShape) -> int:
    """Width of a token's copies on the way to its experts."""
    return shape.moe.top_k * shape.hidden if shape.moe else 0
