"""A worker by itself, in this process."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import hflow
from hflow.plan.plan import Plan
from hflow.runtime.worker.worker import Worker
from tests.runtime.matrix import GRAPHS

SMALL = Path(__file__).with_name("grpo_small.yaml")


@contextmanager
def joined(isolates: bool = False) -> Iterator[Worker]:
    before, worker = torch.get_num_threads(), Worker(isolates=isolates)
    assert worker.join(HashStore(), 1, 0, 1) == {}
    try:
        yield worker
    finally:
        worker.close()
        torch.set_num_threads(before)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with joined() as worker:
        yield worker


@pytest.mark.slow
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


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_a_process_for_functions_changes_no_value(tiny_model: Path) -> None:
    """It stays for the next plan, and ends with the worker."""
    plan = hflow.compile(hflow.load(SMALL, [f"params.model={tiny_model}"]), "local1")
    before = psutil.Process().children()
    with joined() as worker:
        here = values_of(worker, plan)
        assert psutil.Process().children() == before
    with joined(isolates=True) as worker:
        assert values_of(worker, plan) == here
        (process,) = {*psutil.Process().children()} - {*before}
        assert worker.join(HashStore(), 2, 0, 1) == {}
        assert values_of(worker, plan) == here
        assert {*psutil.Process().children()} - {*before} == {process}
    assert not process.is_running()


def values_of(worker: Worker, plan: Plan) -> list[Any]:
    """Metrics and digests of three steps; `reward` runs a function of `rewards.py`."""
    assert "error" not in worker.load(plan)
    reports = [worker.run(step) for step in range(3)]
    assert all(report["metrics"]["reward.score"][0] > 0 for report in reports)
    return [(report["metrics"], report["digests"]) for report in reports]


@pytest.mark.slow
def test_a_worker_that_is_told_to_give_up_does_not_wait_for_a_function(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It is no failure of its own, and another plan may follow."""
    shutil.copy(SMALL, tmp_path)
    (tmp_path / "rewards.py").write_text(
        "from hflow.ops.op import op\n\n"
        '@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")\n'
        "def digits(text, answer):\n    while True: pass\n"
    )
    overrides = [f"params.model={tiny_model}"]
    endless, plan = (
        hflow.compile(hflow.load(folder / SMALL.name, overrides), "local1")
        for folder in (tmp_path, SMALL.parent)
    )
    with joined(isolates=True) as worker:
        assert "error" not in worker.load(endless)
        threading.Timer(5.0, worker.abort).start()
        began = time.monotonic()
        failure = worker.run(0)["error"]
        assert failure.aborted and failure.node == "reward" and time.monotonic() - began < 30
        assert worker.join(HashStore(), 2, 0, 1) == {}
        assert values_of(worker, plan)
