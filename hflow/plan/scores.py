"""How much memory the scores of soft-capped attention take. torch's fused kernels cap none, so that they are
made, for some queries at a time."""

from __future__ import annotations

from hflow.plan.model_shape import ModelShape

SCORES_BYTES = 64 * 2**20
SCORE_COPIES_BYTES = 24  # of a score, in six float32 copies, from which softmax and gradient are made


def scores_bytes(shape: ModelShape) -> int:
    """What a device needs for them, beside what `hflow.cost.memory` counts of attention."""
    return SCORES_BYTES if shape.attention_cap else 0


def queries_at_once(rows: int, heads: int, keys: int) -> tuple[int, int]:
    """Of how many rows, and for how many queries of each, scores of so many keys fit; 1 at least."""
    fitting = max(1, SCORES_BYTES // (SCORE_COPIES_BYTES * heads * keys))
    rows_at_once = min(rows, fitting)
    return rows_at_once, fitting // rows_at_once
