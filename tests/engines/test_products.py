"""Products in bf16 on CPUs for which torch has no fast ones, as all tests say of what they run on."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hflow.graph.adapter import ADAPTER_TARGETS, Adapter
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import predicted
from hflow.runtime.engines.megatron.cpu_kernels.linear import linear
from hflow.runtime.engines.megatron.products import product
from hflow.runtime.rows import Rows
from tests.engines.memory import with_fast_bf16
from tests.engines.models import (
    ADAM,
    Folders,
    generate_node,
    make_call,
    make_engine,
    prompt_rows,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import PPO, ROWS, rollout

ADAPTER = Adapter(4, 6.0, ADAPTER_TARGETS, 0.3)  # with dropout
HALF_A_STEP = 2.0**-8  # of bf16, relative
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "_grouped_mm"}  # of torch's operations


class Seen(TorchDispatchMode):
    """How often torch has been asked for a product, by the dtype of its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.counts[args[1].dtype] = self.counts.get(args[1].dtype, 0) + 1
        return func(*args, **kwargs or {})


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert (found.double() - exact).abs().le(HALF_A_STEP * 1.01 * exact.abs() + 1e-5).all()


def test_a_product_and_its_gradients_are_rounded_once() -> None:
    a, b, upstream = drawn(3, 5, 64, seed=0), drawn(64, 48, seed=1), drawn(3, 5, 48, seed=2)
    with with_fast_bf16(False):
        found = product(a.requires_grad_(), b.requires_grad_())
        to_a, to_b = torch.autograd.grad(found, (a, b), upstream)
    wide_a, wide_b, wide_upstream = (x.detach().double() for x in (a, b, upstream))
    assert_rounded_once(found.detach(), wide_a @ wide_b)
    assert_rounded_once(to_a, wide_upstream @ wide_b.t())
    assert_rounded_once(to_b, wide_a.flatten(0, 1).t() @ wide_upstream.flatten(0, 1))


def test_a_product_of_few_rows_without_a_kernel() -> None:
    """Whose number of outputs no kernel has: with its bias it is rounded once, too."""
    x, weight, bias = drawn(3, 64, seed=0), drawn(9, 64, seed=1), drawn(9, seed=2)
    with with_fast_bf16(False):
        assert_rounded_once(linear(x, weight), x.double() @ weight.double().t())
        assert_rounded_once(linear(x, weight, bias), x.double() @ weight.double().t() + bias.double())


def test_other_products_are_torch_s() -> None:
    a, b = torch.randn(5, 64), torch.randn(64, 48)
    with with_fast_bf16(False):
        assert torch.equal(product(a, b), a @ b)
        assert torch.equal(product(a.double(), b.double()), a.double() @ b.double())
    assert torch.equal(product(a.half(), b.half()), a.half() @ b.half())


def work_on_rank(
    rank: int, new_group: NewGroup, folder: str, adapter: Adapter | None, tiled: bool, data: dict[str, Rows]
) -> tuple[dict[torch.dtype, int], dict[str, Any]]:
    """Products that are asked of torch by a rollout and an update in bf16, and what training reports.

    `tiled`: logits are made by tiles.
    """
    mesh, options = Mesh.of((0,)), ADAM | PPO
    keeps_logits = predicted.keeps_logits
    with (
        with_fast_bf16(False),
        patch.object(predicted, "keeps_logits", lambda *sizes: not tiled and keeps_logits(*sizes)),
        Seen() as seen,
    ):
        engine = make_engine(rank, new_group, folder, mesh, options, "bf16", adapter=adapter)
        generate = make_call(engine, rank, generate_node(ROWS, 1, 4, 1.0), ROWS, ROWS)
        engine.run(generate, {"prompt": prompt_rows(some_prompts(ROWS))})
        train = make_call(engine, rank, train_node(ROWS, ROWS, options), ROWS, ROWS)
        metrics = engine.run(train, data).metrics
    return seen.counts, dict(metrics)


@pytest.mark.parametrize(
    ("family", "adapter", "tiled"),
    [
        ("qwen2", None, False),
        ("qwen2", None, True),
        ("qwen2", ADAPTER, False),
        ("qwen3_moe", None, False),
        ("gpt_oss", None, False),
        ("gemma2", None, True),
    ],
)
def test_models_multiply_nothing_in_bf16(
    pool: Pool, folders: Folders, family: str, adapter: Adapter | None, tiled: bool
) -> None:
    folder = folders.of(family, False)
    [(counts, metrics)] = pool.run(1, work_on_rank, folder, adapter, tiled, rollout(folder))
    assert counts.get(torch.float32, 0) > 20 and torch.bfloat16 not in counts
    assert metrics["grad_norm"][0] > 0
