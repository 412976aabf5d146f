"""What a checkpoint takes of a worker's memory while it is written, against what plans say."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

import hflow
from hflow.cost.instances import instance_residency, instance_users
from hflow.plan.plan import Plan
from hflow.runtime.tools.new_model import new_model
from hflow.runtime.worker.worker import Worker
from tests.runtime.matrix import GRAPHS

MB = 10**6
PLANS = {
    "one": ("rollout=tp1@0", "actor_train=tp1@0"),
    "zero1": ("rollout=dp2@0-1", "actor_train=dp2,zero1@0-1"),
    "apart": ("rollout=dp2@0-1", "actor_train=tp1@0"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4.2 million parameters: 17 MB of weights, 50 MB of what is trained."""
    folder = tmp_path_factory.mktemp("models") / "model"
    new_model(folder, layers=4, hidden=256, ffn=1024, alphabet="0123456789+=. ")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_worker_grows_by_what_the_plan_says(model: Path, tmp_path: Path, name: str) -> None:
    """The rollouts' weights are older ones. Predicted are the greatest part of all devices, and no more than
    a row of a parameter is shared unevenly."""
    graph = hflow.load(GRAPHS / "lagged.yaml", [f"params.model={model}", "params.steps=2"])
    plan = hflow.compile(graph, "local4", PLANS[name])
    found = grown(plan, tmp_path)
    for rank, (growth, written) in enumerate(found):
        predicted = snapshot_of(plan, rank)
        assert predicted > 8 * MB
        assert written == pytest.approx(predicted, rel=0.02)
        assert growth == pytest.approx(predicted, abs=6 * MB)


def snapshot_of(plan: Plan, device: int) -> int:
    users = instance_users(plan.graphs, plan.nodes)
    kept = {i: instance_residency(plan.graph, plan.shapes, plan.cluster, i, users) for i in users}
    return sum(each.snapshot_bytes for i, each in kept.items() if device in i.mesh.devices)


def grown(plan: Plan, folder: Path) -> list[tuple[int, int]]:
    """Of each worker, in a process of its own: by how much its memory grows at most, and what it writes."""
    context = multiprocessing.get_context("spawn")
    size, results = max(plan.devices) + 1, context.Queue()
    ranks = [context.Process(target=_on_rank, args=(r, size, plan, folder, results)) for r in range(size)]
    try:
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def _on_rank(rank: int, size: int, plan: Plan, folder: Path, results: Any) -> None:
    worker = Worker()
    _succeed(worker.join(FileStore(str(folder / "store"), size), 1, rank, size))
    _succeed(worker.load(plan))
    for step in range(plan.graph.steps):
        _succeed(worker.run(step))
    ctypes.CDLL(None).malloc_trim(0)  # what steps have freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # the greatest so far is forgotten
    before = _kilobytes("VmRSS")
    (folder / str(rank)).mkdir()
    _succeed(worker.checkpoint(plan.graph.steps, str(folder / str(rank))))
    _succeed(worker.end_checkpoint())
    growth = (_kilobytes("VmHWM") - before) * 1024
    results.put((rank, (growth, sum(file.stat().st_size for file in (folder / str(rank)).iterdir()))))
    results.close()
    results.join_thread()
    worker.close()


def _succeed(report: dict[str, Any]) -> None:
    assert "error" not in report, report


def _kilobytes(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))
