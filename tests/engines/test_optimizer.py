"""Which of torch's implementations of AdamW a model's optimizer takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

from hflow.runtime.engines.megatron.optimizer import _fuse


def chosen(optimizer: Any) -> tuple[bool | None, bool | None]:
    _fuse(optimizer)
    (group,) = optimizer.param_groups
    return group["fused"], group["foreach"]


def test_it_is_fused() -> None:
    assert chosen(AdamW([torch.nn.Parameter(torch.ones(2))])) == (True, False)


def test_another_optimizer_stays_as_it_is() -> None:
    class Own(AdamW):
        """Such as Transformer Engine's, whose groups mean something else."""

    assert chosen(Own([torch.nn.Parameter(torch.ones(2))])) == (None, None)


def test_a_fused_update_is_the_same() -> None:
    """On a CPU, where torch has both: within float32's rounding."""
    updated: list[torch.Tensor] = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1000))
        optimizer = AdamW([weight], lr=1e-2)
        optimizer.param_groups[0]["fused"] = fused
        for _ in range(3):
            weight.grad = torch.randn(1000)
            optimizer.step()
        updated.append(weight.detach())
    assert torch.allclose(*updated, rtol=1e-6, atol=1e-7)
