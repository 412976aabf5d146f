"""How much memory the scores of attention take where they are soft-capped or stand beside sinks. torch's
fused kernels know neither, so that scores are made, for some queries at a time."""

from __future__ import annotations

from math import ceil

from hflow.plan.model_shape import ModelShape

SCORES_BYTES = 64 * 2**20
SCORE_COPIES_BYTES = 16  # of a score, in four float32 copies, from which softmax and gradient are made


def scores_bytes(shape: ModelShape, rows: int, keys: int, tp: int) -> int:
    """What a device needs for those of `rows` with so many keys, beside queries, keys and values."""
    if not shape.explicit_scores:
        return 0
    return min(SCORES_BYTES, SCORE_COPIES_BYTES * rows * ceil(shape.num_heads / tp) * keys**2)


def queries_at_once(rows: int, heads: int, keys: int) -> tuple[int, int]:
    """Of how many rows, and for how many queries of each, scores of so many keys fit; 1 at least."""
    fitting = max(1, SCORES_BYTES // (SCORE_COPIES_BYTES * heads * keys))
    rows_at_once = min(rows, fitting)
    return rows_at_once, fitting // rows_at_once
