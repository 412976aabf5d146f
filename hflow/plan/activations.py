"""How much a forward pass holds on a device, in numbers of elements."""

from __future__ import annotations

from math import ceil

from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape


def forward_elements(
    shape: ModelShape,
    tokens: int,
    mesh: Mesh,
    sp: bool = False,
    scores: int = 0,
    whole_experts: bool = False,
) -> int:
    """The most that a forward pass holds on a device: residual, norm's output, and attention, with so many
    elements of its `scores`, or MLP. With sequence parallelism (`sp`), parts of the former two, and what a
    product has gathered of the latter."""
    attention = shape.query_width + shape.kv_width(mesh.tp) + shape.attended_width
    mlp = ceil(3 * shape.ffn / mesh.tp) + 2 * routed_width(shape, mesh, whole_experts)
    attention = tokens * (ceil(attention / mesh.tp) + shape.latent_width) + scores
    between = shape.hidden + ceil(2 * shape.hidden / mesh.tp) if sp else 2 * shape.hidden
    return tokens * between + max(attention, tokens * mlp)


def routed_width(shape: ModelShape, mesh: Mesh, whole_experts: bool) -> int:
    """Width of a token's copies on the way to its experts. Where tp cuts these, each of its ranks has all;
    `whole_experts` get a part of the tokens from each."""
    if shape.moe is None:
        return 0
    return ceil(shape.moe.top_k * shape.hidden / (mesh.tp if whole_experts else 1))
