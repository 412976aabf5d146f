"""What attention with explicit scores holds, by torch's allocator, beside what plans count."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from hflow.plan import scores
from hflow.plan.model_shape import ModelShape
from hflow.plan.named_shapes import NAMED_SHAPES
from hflow.runtime.engines.megatron.explicit_attention import attend_explicitly
from tests.engines.memory import peak_bytes, with_fast_bf16

ROWS, HEADS, GROUPS, TOKENS, WIDTH = 8, 8, 4, 256, 4
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def shape_of(name: str) -> ModelShape:
    return replace(NAMED_SHAPES[name], num_heads=HEADS, num_kv_heads=GROUPS, head_dim=WIDTH)


@pytest.mark.parametrize("queries_at_once", [50, 64, TOKENS])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-2-2b"])
def test_scores_take_what_plans_count(name: str, dtype: str, queries_at_once: int) -> None:
    """However many parts there are: the scores of one are gone when those of the next are made."""
    shape, of = shape_of(name), DTYPES[dtype]
    query, key, value = (
        torch.randn(ROWS, heads, TOKENS, WIDTH, dtype=of, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    sinks = torch.zeros(HEADS, dtype=of, requires_grad=True) if shape.sinks else None
    given = query, key, value, shape.attention_cap, sinks
    counted = scores.SCORE_COPIES_BYTES * ROWS * HEADS * TOKENS * queries_at_once
    with patch.object(scores, "SCORES_BYTES", counted), with_fast_bf16(True):
        forward = peak_bytes(lambda: attend_explicitly(*given))
        found = attend_explicitly(*given)
        backward = peak_bytes(found.sum().backward)
        arguments = ROWS, TOKENS, 1
        planned_forward = scores.forward_scores_bytes(shape, dtype, *arguments)
        planned_backward = scores.backward_scores_bytes(shape, *arguments)
    # Beside scores there are vectors, of 8 to 24 numbers where a query has 256 scores, and the mask that all
    # heads and rows share, which is made of 14 bytes where these have 64 scores.
    assert 1 <= backward / planned_backward < 1.1
    assert 1 <= forward / planned_forward < 1.15
