"""Which logits a device keeps between forward and backward pass, and in what parts it makes the others.

The logits of a micro-batch are ``[tokens, vocab / tp]``. A loss reads a number or two of each token, but for
the gradient all of its logits are needed again. They are kept where they take no more than `LOGITS_BYTES`
with all that is made of them. Else the product of hidden states and output matrix is made twice, each time
by tiles of tokens and vocabulary that take as much: a score node makes it once.
"""

from __future__ import annotations

from math import ceil, isqrt

from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape

LOGITS_BYTES = 128 * 2**20
COPIES_BYTES = 8  # of a logit, in two float32 copies, from which softmax, entropy and gradient are made
KEPT_BYTES = 16  # of a logit that is kept: these, itself and its gradient, in float32 at most


def keeps_logits(tokens: int, width: int) -> bool:
    """Whether the logits of so many tokens, of `width` words each, are kept."""
    return KEPT_BYTES * tokens * width <= LOGITS_BYTES


def tile_side(capped: bool = False) -> int:
    """The most tokens, and the most words, of a tile. Being square, it is read and added up with the least
    traffic for its products. Of logits that are `capped` one more float32 copy is made: of their slope."""
    return max(1, isqrt(LOGITS_BYTES // (COPIES_BYTES + 4 * capped)))


def outputs_per_position(shape: ModelShape, mesh: Mesh) -> int:
    """Numbers per position on a device: the only one of a scalar head is on every rank of tp."""
    return ceil(shape.outputs / (mesh.tp if shape.head == "lm" else 1))
