"""Values go from worker to worker: no tensor and no array is ever pickled for the controller, or by it."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayTaskError

import hflow
from hflow.graph.ir import Graph
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from tests.runtime.matrix import GRAPHS

KINDS = (torch.Tensor, torch.nn.Parameter, np.ndarray)
MAKERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(3),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "array": lambda: np.zeros(3),
}


class TensorPickledError(Exception):
    pass


def _refuse(value: Any) -> Any:
    raise TensorPickledError(f"a {type(value).__name__} of {np.prod(value.shape)} numbers was pickled")


def forbid(_: Any = None) -> None:
    """From now on, pickling a tensor or an array fails in this process; Ray's pickler looks here first."""
    for kind in KINDS:
        copyreg.pickle(kind, _refuse)


def permit(_: Any = None) -> None:
    for kind in KINDS:
        copyreg.dispatch_table.pop(kind, None)


def in_workers(pool: Any, function: Callable[[Any], Any]) -> list[Any]:
    """What `function` returns of each worker object, in its own process."""
    return ray.get([actor.__ray_call__.remote(function) for actor in pool._workers.actors])


@pytest.fixture
def guarded(workers: Pool) -> Iterator[Pool]:
    in_workers(workers, forbid)
    forbid()
    yield workers
    permit()
    in_workers(workers, permit)


@pytest.mark.parametrize("make", MAKERS)
def test_the_guard_notices(guarded: Pool, make: str) -> None:
    """On the way to the controller, inside of something larger, and on the way from it."""
    with pytest.raises(RayTaskError, match="of 3 numbers was pickled"):
        in_workers(guarded, lambda _: {"report": [MAKERS[make]()]})
    with pytest.raises(TensorPickledError, match="of 3 numbers was pickled"):
        ray.put({"argument": [MAKERS[make]()]})


def graph_of(name: str, **params: Any) -> Graph:
    return hflow.load(GRAPHS / f"{name}.yaml", [f"params.{key}={value}" for key, value in params.items()])


def test_grpo(guarded: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """Rows and weights move between disjoint meshes, and nothing fails."""
    graph = graph_of("grpo_tiny", model=tiny_model, steps=2)
    pins = ("rollout=tp2@2-3", "ref_logprobs=tp1@1", "actor_train=dp2@0-1")
    run = execute(hflow.compile(graph, "local4", pins), tmp_path / "run", pool=guarded, export=False)
    assert run.status == "finished" and len(run.evaluations) == 2


def test_ppo(guarded: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path) -> None:
    graph = graph_of("ppo_small", model=tiny_model, reward_model=tiny_reward, steps=2)
    pins = ("rollout=dp2@0-1", "actor_train=tp2@0-1", "ref_logprobs=dp2@0-1")
    pins += ("critic_train=pp2@2-3", "values=dp2@2-3", "reward=tp1@3")
    run = execute(hflow.compile(graph, "local4", pins), tmp_path / "run", pool=guarded, export=False)
    assert run.status == "finished" and len(run.evaluations) == 2


def test_a_region_with_carried_values(guarded: Pool, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("region", "carried", "lagged"):
        graph = graph_of(name, model=tiny_model, steps=2)
        pins = [f"{n.name}={'dp2@0-1' if n.op == 'train' else 'dp2@2-3'}" for n in graph.nodes if n.model]
        plan = hflow.compile(graph, "local4", pins)
        assert execute(plan, tmp_path / name, pool=guarded, export=False).status == "finished"
