"""The balancing loss against autograd on transformers' router logits, for every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hflow.plan.layout import Mesh
from hflow.plan.read_shape import read_shape
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.rows import Rows
from tests.engines.models import ADAM, Folders, load_hf, named_in_files
from tests.engines.processes import Pool
from tests.engines.test_strategies import train_on_rank
from tests.engines.test_train import MESHES, PPO, ROWS, rollout

COEF = 0.5
EP2, RECOMPUTE = Strategy(ep=2), Strategy("full")


def balancing(model: Any, data: dict[str, Rows], folder: str) -> torch.Tensor:
    """Over all tokens of all rows at once: of each row those that the model reads, all but the last."""
    moe = read_shape(folder).moe
    assert moe
    rows = [data["tokens"].slice(r, r + 1).values.long() for r in range(ROWS)]
    read = [row[: max(1, len(row) - int(n > 0))] for row, n in zip(rows, data["mask"].row_lengths)]
    logits = [model(row[None], output_router_logits=True).router_logits for row in read]
    losses: list[torch.Tensor] = []
    for layer in zip(*logits):
        probabilities = torch.cat(layer).softmax(-1)
        chosen = probabilities.topk(moe.top_k).indices
        share = torch.nn.functional.one_hot(chosen, moe.num_experts).double().mean((0, 1))
        losses.append(moe.num_experts * (share * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize(
    ("layout", "strategy", "family"),
    [
        ("one", PLAIN, "qwen3_moe"),
        ("one", RECOMPUTE, "mixtral"),
        ("dp2", EP2, "mixtral"),
        ("tp2dp2", EP2, "qwen3_moe"),
        ("pp2dp2", EP2, "qwen3_moe probabilities"),
        ("tp2dp2", EP2, "gpt_oss"),
    ],
)
def test_the_loss_and_its_gradient_equal_autograds(
    pool: Pool, folders: Folders, layout: str, strategy: Strategy, family: str
) -> None:
    balance_is_exact(pool, folders.of(family, False), MESHES[layout], strategy)


def balance_is_exact(pool: Pool, folder: str, mesh: Mesh, strategy: Strategy) -> None:
    """What the option adds to the gradients is the coefficient times the gradient of the loss."""
    data, model = rollout(folder), load_hf(folder, torch.float64)
    options = ADAM | PPO | {"aggregate": "sequence_mean"}
    loss = COEF * balancing(model, data, folder)
    loss.backward()
    gradients = ((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in model.named_parameters())
    expected = named_in_files(folder, gradients)
    runs = [
        pool.run(len(mesh.devices), train_on_rank, folder, mesh, data, options | more, 1, strategy)
        for more in ({"balance_coef": COEF}, {})
    ]
    told = [metrics["expert_balance"] for metrics, _, _ in runs[0] if "expert_balance" in metrics]
    assert told == [(pytest.approx(loss.item() / COEF, rel=1e-6), 1.0)]
    for (_, balanced, _), (_, plain, _) in zip(*runs):
        for name, (box, gradient, _) in balanced.items():
            where = tuple(slice(a, b) for a, b in box)
            added = torch.from_numpy(gradient - plain[name][1]).double()
            # differences of float32 gradients of size up to about 1
            torch.testing.assert_close(added, expected[name][where], atol=1e-6, rtol=1e-5)
    gates = [g for name, g in expected.items() if name.endswith(("gate.weight", "router.weight"))]
    assert min(float(g.abs().max()) for g in gates) > 1e-3
