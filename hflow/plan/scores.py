"""How much memory the scores of attention take where they are soft-capped or stand beside sinks. torch's
fused kernels know neither, so that scores are made, for some queries at a time."""

from __future__ import annotations

from math import ceil

from hflow.plan.model_shape import ModelShape

SCORES_BYTES = 64 * 2**20
SCORE_COPIES_BYTES = 16  # of a score at most, in four float32 copies: queries at once are as many as fit then


def forward_scores_bytes(shape: ModelShape, dtype: str, rows: int, keys: int, tp: int, cp: int = 1) -> int:
    """What a forward pass needs on a device for the scores of `rows` with so many keys, in float32: with caps
    the tanh, the capped scores and their softmax. With sinks the softmax overwrites its scores, which in bf16
    lie beside it in that format, as what was multiplied and as what multiplies values."""
    if not shape.explicit_scores:
        return 0
    copies_bytes = 3 * 4 if shape.attention_cap is not None else 4 + 2 * (dtype == "bf16")
    return copies_bytes * _scores_at_once(shape, rows, keys, tp, cp)


def backward_scores_bytes(shape: ModelShape, rows: int, keys: int, tp: int, cp: int = 1) -> int:
    """What a backward pass needs, in float32: the softmax, which is made again, its gradient, and the product
    of both, of which the sums are taken; with caps also the tanh."""
    if not shape.explicit_scores:
        return 0
    copies = 4 if shape.attention_cap is not None else 3
    return 4 * copies * _scores_at_once(shape, rows, keys, tp, cp)


def _scores_at_once(shape: ModelShape, rows: int, keys: int, tp: int, cp: int) -> int:
    """Of the queries that have most of them: the last whole turn, or what is left for one more. Queries have
    scores of the keys up to the last of them; layers without a window have the most. Over cp a row is cut
    into 2 cp parts, of which each attends by itself."""
    heads, last = ceil(shape.num_heads / tp), keys if cp == 1 else ceil(keys / (2 * cp))
    rows_at_once, queries = queries_at_once(rows if cp == 1 else 1, heads, keys)
    whole = last // queries * queries
    turn = queries * (keys - last + whole) if whole else 0
    return rows_at_once * heads * max(turn, (last - whole) * keys)


def queries_at_once(rows: int, heads: int, keys: int) -> tuple[int, int]:
    """Of how many rows, and for how many queries of each, scores of so many keys fit; 1 at least."""
    fitting = max(1, SCORES_BYTES // (SCORE_COPIES_BYTES * heads * keys))
    rows_at_once = min(rows, fitting)
    return rows_at_once, fitting // rows_at_once
