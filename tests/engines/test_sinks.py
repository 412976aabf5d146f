"""Attention sinks and clamped gates of gpt-oss, against transformers and autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

from hflow.plan import scores
from hflow.plan.model_shape import GateClamp
from hflow.runtime.engines.megatron.explicit_attention import attend_explicitly, attend_explicitly_newest
from hflow.runtime.engines.megatron.gated import ClampedSwiGLU
from tests.engines.test_soft_caps import GROUPS, HEADS, ROWS, TOKENS, WIDTH, seen_by, tensors


def sinks(dtype: torch.dtype) -> Tensor:
    """One that takes nearly all of the softmax, one that takes nothing, and two between."""
    return torch.tensor([9.0, -30.0, 0.5, -1.0], dtype=dtype, requires_grad=True)


def of_transformers(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -torch.inf)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    return eager_attention_forward(module, query, key, value, mask, WIDTH**-0.5)[0].transpose(1, 2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scores_at_once", [1, TOKENS * HEADS * 3, 10**6])
def test_attention_and_its_gradients(scores_at_once: int, window: int | None, padded: bool) -> None:
    present = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    present[1, :5] = False
    given = present if padded else None
    mine, theirs = ([*tensors(torch.float32), sinks(torch.float32)] for _ in range(2))
    with patch.object(scores, "SCORES_BYTES", scores.SCORE_COPIES_BYTES * scores_at_once):
        query, key, value, of_heads = mine
        found = attend_explicitly(query, key, value, None, of_heads, window, given)
        (found * torch.arange(WIDTH)).sum().backward()
    expected = of_transformers(*theirs, seen_by(window, given))  # type: ignore[call-arg]
    (expected * torch.arange(WIDTH)).sum().backward()
    # float32, in another order of summation
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for x, other in zip(mine, theirs):
        torch.testing.assert_close(x.grad, other.grad, atol=1e-4, rtol=1e-5)  # sums of numbers of size 100


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("scores_at_once", [1, TOKENS * HEADS * 3, 10**6])
def test_the_last_queries_see_what_is_before_them(
    scores_at_once: int, queries: int, window: int | None
) -> None:
    """As ranks of cp have them, which gather the keys of all tokens."""
    mine, theirs = ([*tensors(torch.float64), sinks(torch.float64)] for _ in range(2))
    query, key, value, of_heads = mine
    with patch.object(scores, "SCORES_BYTES", scores.SCORE_COPIES_BYTES * scores_at_once):
        found = attend_explicitly(query[:, :, -queries:], key, value, None, of_heads, window)
        (found * torch.arange(WIDTH)).sum().backward()
    expected = of_transformers(*theirs, seen_by(window, None))[:, :, -queries:]  # type: ignore[call-arg]
    (expected * torch.arange(WIDTH)).sum().backward()
    # transformers' softmax is of float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for x, other in zip(mine, theirs):
        torch.testing.assert_close(x.grad, other.grad, atol=1e-4, rtol=1e-5)


def test_half_precision_is_close_to_float32() -> None:
    """Scores and their softmax are float32; what goes in and comes out has 8 bits."""
    wide = [*tensors(torch.bfloat16), sinks(torch.bfloat16)]
    narrow = [x.detach().clone().requires_grad_() for x in wide]
    query, key, value, of_heads = (x.float() for x in wide)
    expected = attend_explicitly(query, key, value, None, of_heads)
    mine_query, mine_key, mine_value, mine_sinks = narrow
    found = attend_explicitly(mine_query, mine_key, mine_value, None, mine_sinks)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=2**-7)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    for x, other in zip(narrow, wide):
        torch.testing.assert_close(x.grad, other.grad, atol=0.2, rtol=2**-5)


def test_the_newest_token_sees_what_it_sees_among_the_others() -> None:
    query, key, value = tensors()
    of_heads = sinks(torch.float64)
    present = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    present[1, :5] = False
    last = query[:, :, -1].unflatten(1, (GROUPS, -1))
    found = attend_explicitly_newest(last, key, value, None, of_heads, present).flatten(1, 2)
    among = attend_explicitly(query, key, value, None, of_heads, None, present)
    torch.testing.assert_close(found, among[:, :, -1])


def test_clamped_gates_and_their_gradients() -> None:
    """On both sides of every limit; transformers has gate and up in alternate columns."""
    experts: Any = GptOssExperts
    module = SimpleNamespace(limit=0.7, alpha=1.3)
    mine = ClampedSwiGLU(GateClamp(slope=1.3, limit=0.7))
    x = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alternate = x.unflatten(-1, (2, 5)).transpose(-1, -2).flatten(-2)
    assert (x > 0.7).any() and (x < -0.7).any()
    torch.testing.assert_close(mine(x), experts._apply_gate(module, alternate))
    assert gradcheck(mine, (x.requires_grad_(),))
