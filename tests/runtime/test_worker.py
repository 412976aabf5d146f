"""A worker by itself, in this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import hflow
from hflow.plan.plan import Plan
from hflow.runtime.worker.worker import Worker
from tests.runtime.matrix import GRAPHS


@pytest.fixture
def worker() -> Iterator[Worker]:
    before, worker = torch.get_num_threads(), Worker()
    assert worker.join(HashStore(), 1, 0, 1) == {}
    yield worker
    worker.close()
    torch.set_num_threads(before)


def test_nothing_is_left_of_the_plan_before(worker: Worker, tiny_model: Path) -> None:
    """A trained model is in reference cycles."""
    graph = hflow.load(GRAPHS / "grpo_tiny.yaml", [f"params.model={tiny_model}"])
    plan = hflow.compile(graph, "local1")
    assert "error" not in worker.load(plan)
    trained = parameter_of(worker, plan)
    assert trained() is not None
    assert "error" not in worker.load(plan)
    assert trained() is None
    again = parameter_of(worker, plan)
    worker.close()
    assert again() is None


def parameter_of(worker: Worker, plan: Plan) -> weakref.ref[torch.nn.Parameter]:
    """A parameter of the trained actor."""
    assert worker.interpreter
    engine = worker.interpreter.engines.model(plan.graph.node("actor_train"), plan.node("actor_train"))
    return weakref.ref(next(engine.model.parameters()))  # type: ignore[union-attr]
