"""Soft-capped scores and logits, and the norms of Gemma, against transformers and autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, eager_attention_forward

from hflow.plan import scores
from hflow.runtime.engines.megatron.explicit_attention import attend_explicitly, attend_explicitly_newest
from hflow.runtime.engines.megatron.norm import OffsetRMSNorm
from hflow.runtime.engines.megatron.soft_cap import soft_capped_

ROWS, HEADS, GROUPS, TOKENS, WIDTH, CAP = 3, 4, 2, 11, 6, 1.5


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values with scores beyond the cap."""
    generator = torch.Generator().manual_seed(3)
    sizes = (HEADS, GROUPS, GROUPS)
    made = [torch.randn(ROWS, heads, TOKENS, WIDTH, generator=generator) * 2 for heads in sizes]
    return [x.to(dtype).requires_grad_() for x in made]


def of_transformers(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """`seen`: bool ``[rows or 1, 1, tokens, keys]``."""
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, head_dim=WIDTH, training=False)
    return eager_attention_forward(module, query, key, value, mask, softcap=CAP)[0].transpose(1, 2)


def seen_by(window: int | None, present: Tensor | None) -> Tensor:
    at = torch.arange(TOKENS)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or TOKENS))
    return seen[None, None] if present is None else (seen & present[:, None, None]) | (distance == 0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scores_at_once", [1, TOKENS * HEADS * 3, 10**6])
def test_attention_and_its_gradients(scores_at_once: int, window: int | None, padded: bool) -> None:
    present = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    present[1, :5] = False
    given = present if padded else None
    mine, theirs = tensors(torch.float32), tensors(torch.float32)
    with patch.object(scores, "SCORES_BYTES", scores.SCORE_COPIES_BYTES * scores_at_once):
        query, key, value = mine
        found = attend_explicitly(query, key, value, CAP, None, window, given)
        (found * torch.arange(WIDTH)).sum().backward()
    query, key, value = theirs
    expected = of_transformers(query, key, value, seen_by(window, given))
    (expected * torch.arange(WIDTH)).sum().backward()
    # float32, in another order of summation
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for x, other in zip(mine, theirs):
        torch.testing.assert_close(x.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_the_newest_token_sees_what_it_sees_among_the_others() -> None:
    query, key, value = tensors()
    present = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    present[1, :5] = False
    last = query[:, :, -1].unflatten(1, (GROUPS, -1))
    found = attend_explicitly_newest(last, key, value, CAP, None, present).flatten(1, 2)
    torch.testing.assert_close(
        found, attend_explicitly(query, key, value, CAP, None, None, present)[:, :, -1]
    )


def test_only_a_part_of_the_scores_is_made_at_once() -> None:
    """Of any length: the largest tensors beside inputs and outputs have the bytes that plans count."""
    assert scores.queries_at_once(rows=64, heads=16, keys=8192) == (32, 1)
    assert scores.queries_at_once(rows=1, heads=16, keys=8192) == (1, 32)
    assert scores.queries_at_once(rows=2, heads=1, keys=10**9) == (1, 1)


def test_capped_logits_keep_no_copy() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: soft_capped_(x * 3, CAP), (x,))
    made = x * 3
    assert soft_capped_(made, CAP).data_ptr() == made.data_ptr()
    assert soft_capped_(x, None) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_multiply_by_one_more_than_their_weight(dtype: torch.dtype) -> None:
    """To the bit in bf16, where 1 and a small weight would be 1."""
    config: Any = SimpleNamespace(params_dtype=dtype)
    mine, theirs = OffsetRMSNorm(config, 16, eps=1e-5), Gemma2RMSNorm(16, eps=1e-5).to(dtype)
    torch.nn.init.normal_(mine.weight, std=1e-3)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(9, 16).to(dtype).requires_grad_()
    other = x.detach().clone().requires_grad_()
    found, expected = mine(x), theirs(other)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found.square().sum().backward()
    expected.square().sum().backward()
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.1, 2**-6)
    torch.testing.assert_close(x.grad, other.grad, atol=atol, rtol=rtol)
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, atol=atol, rtol=rtol)
