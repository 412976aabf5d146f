"""No worker unpickles what another one sends, or what lies in the rendezvous store or in a checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from tests.runtime.matrix import GRAPHS
from tests.runtime.test_no_tensor_through_the_controller import in_workers
from tests.runtime.test_resume import EVERY, up_to

pytestmark = pytest.mark.slow


def refuse_pickles(worker: Any) -> None:
    """From now on nothing in a worker is unpickled, except by Ray, which has taken the functions before."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is unpickled")

    worker.loaders = pickle.load, pickle.loads, pickle.Unpickler, torch.load

    class Refusing(pickle.Unpickler):  # modules that are imported later may inherit from it
        load = refuse

    pickle.load = pickle.loads = torch.load = refuse
    pickle.Unpickler = torch.distributed.distributed_c10d._unpickler = Refusing


def permit_pickles(worker: Any) -> None:
    pickle.load, pickle.loads, pickle.Unpickler, torch.load = worker.loaders
    torch.distributed.distributed_c10d._unpickler = pickle.Unpickler


def gather_objects(worker: Any) -> None:
    if worker.world:
        torch.distributed.all_gather_object([None] * worker.world.size, "something")


def digests(run: Run) -> list[Any]:
    """Of all tokens that were sampled, by step."""
    return [line["digest.rollout"] for line in run.metrics]


@pytest.fixture
def guarded(workers: Pool) -> Iterator[Pool]:
    in_workers(workers, refuse_pickles)
    yield workers
    in_workers(workers, permit_pickles)


def test_a_run_unpickles_nothing_between_workers(guarded: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """Workers meet, load, train, move weights between layouts, write checkpoints and export; and go on from a
    checkpoint under a plan with every kind of group."""
    graph = hflow.load(GRAPHS / "grpo_tiny.yaml", [f"params.model={tiny_model}", "params.steps=2"])
    pins = ("rollout=dp2@0-1", "actor_train=tp2@0-1", "ref_logprobs=dp2@0-1")
    whole = execute(hflow.compile(graph, "local", pins), tmp_path / "run", pool=guarded, config=EVERY)
    assert whole.status == "finished" and list((tmp_path / "run" / "export").iterdir())

    pins = ("rollout=tp2,dp2@0-3", "actor_train=dp2,tp2,zero1@0-3", "ref_logprobs=pp2,tp2@0-3")
    folder = up_to(tmp_path / "run", 1, tmp_path / "resumed")
    resumed = execute(hflow.compile(graph, "local4", pins), folder, pool=guarded, config=EVERY, resume=True)
    assert resumed.status == "finished" and digests(resumed) == digests(whole)


def test_torchs_collectives_for_objects_would_be_noticed(guarded: Pool) -> None:
    guarded.form(4)
    with pytest.raises(RayTaskError, match="something is unpickled"):
        in_workers(guarded, gather_objects)
