"""Training on scores of whole rows, with numbers per group of rows, against plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from hflow.graph.ir import Function
from hflow.ops.pairwise import bradley_terry
from hflow.plan.layout import Mesh
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.rows import Rows, from_lists
from tests.engines.models import (
    ADAM,
    Folders,
    load_hf,
    make_call,
    make_engine,
    read_training,
    reference_adamw,
    some_prompts,
    train_node,
)
from tests.engines.processes import Pool
from tests.engines.test_train import MESHES, compare

ROWS, UPDATES = 20, 2
OPTIONS: dict[str, Any] = {"margin": 0.2, "tie_threshold": 0.0, "centre_coef": 0.05}
FUNCTION = Function(
    "hflow.ops.pairwise.bradley_terry",
    bradley_terry.__hflow_signature__,  # type: ignore[attr-defined]
    OPTIONS,
    ("score",),
)


def batch() -> dict[str, Rows]:
    """Pairs of very different lengths, so that rows move between ranks; a margin for each."""
    generator = torch.Generator().manual_seed(8)
    prompts = [prompt for prompt in some_prompts(ROWS // 2) for _ in range(2)]
    lengths = torch.randint(1, 9, (ROWS,), generator=generator)
    lengths[:6] = 20
    responses = [torch.randint(3, 25, (int(n),), generator=generator).tolist() for n in lengths]
    return {
        "tokens": from_lists([p + r for p, r in zip(prompts, responses)]),
        "mask": Rows(torch.ones(int(lengths.sum()), dtype=torch.bool), lengths),
        "margins": Rows(torch.rand(ROWS // 2, generator=generator)),
    }


def train_on_rank(
    rank: int, new_group: NewGroup, folder: str, mesh: Mesh, data: dict[str, Rows], micro_batch: int
) -> Any:
    engine = make_engine(rank, new_group, folder, mesh, ADAM, head="scalar")
    node = train_node(ROWS, ROWS // UPDATES, OPTIONS, FUNCTION, group=2)
    call = make_call(engine, rank, node, ROWS, micro_batch, unit=2)
    start, stop = call.first_row, call.first_row + call.num_rows
    mine = {name: rows.slice(start, stop) for name, rows in data.items() if name != "margins"}
    mine["margins"] = data["margins"].slice(start // 2, stop // 2)
    return dict(engine.run(call, mine).metrics), read_training(engine)


def reference(folder: str, data: dict[str, Rows]) -> Any:
    """Scores by the classifier of transformers, one row at a time; the loss as papers write it."""
    model: Any = load_hf(folder, torch.float64, "scalar")
    adam = reference_adamw(model, ADAM)
    metrics: dict[str, list[float]] = {}
    for update in range(UPDATES):
        adam.zero_grad()
        losses, found = [], {"margin": [], "accuracy": [], "mean_score": []}
        for pair in range(update, ROWS // 2, UPDATES):
            rows = (data["tokens"].slice(r, r + 1).values.long() for r in (2 * pair, 2 * pair + 1))
            chosen, rejected = (model(tokens[None]).logits.squeeze() for tokens in rows)
            extra = OPTIONS["margin"] + float(data["margins"].values[pair])
            centred = OPTIONS["centre_coef"] * (chosen + rejected) ** 2
            losses.append(-logsigmoid(chosen - rejected - extra) + centred)
            found["margin"].append(float((chosen - rejected).detach()))
            found["accuracy"].append(float(chosen > rejected))
            found["mean_score"].append(float((chosen + rejected).detach()) / 2)
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        adam.step()
        found |= {
            "loss": [float(loss)],
            "grad_norm": [float(norm)],
            "lr": [ADAM["lr"]],
            "skipped_updates": [0.0],
        }
        for name, values in found.items():
            metrics.setdefault(name, []).extend(values)
    named = {name: (p.grad, p.detach()) for name, p in model.named_parameters()}
    return {name: sum(values) / len(values) for name, values in metrics.items()}, named


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout,micro_batch", [("one", 20), ("one", 4), ("dp2", 6), ("pp2dp2", 4), ("tp2", 20)]
)
def test_a_reward_model_learns_as_plain_pytorch(
    pool: Pool, folders: Folders, layout: str, micro_batch: int
) -> None:
    """Every rank's share is uneven, its rows move by their lengths, and the margins go with them."""
    folder, mesh, data = folders.of("qwen2", False, "scalar"), MESHES[layout], batch()
    metrics, named = reference(folder, data)
    results = pool.run(len(mesh.devices), train_on_rank, folder, mesh, data, micro_batch)
    # float32 gradients of size up to about 10; rounding grows over two updates
    compare(results, metrics, named, atol=2e-6)
    assert max(float(g.abs().max()) for g, _ in named.values()) > 0.01
    assert 0.0 < metrics["accuracy"] < 1.0
