"""Many steps leave nothing behind: memory, values, files, threads and processes stay as many as they were."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.rows import Rows
from hflow.runtime.run import Run
from tests.runtime.matrix import GRAPHS

pytestmark = pytest.mark.slow
POLL_S = 0.02
CENSUSES = 25
MOST_BYTES = 4 * 2**20  # that a process may grow after the warm-up
WARM_UP = 0.4  # of all censuses: allocators and Ray take what they need at first


@dataclass(frozen=True)
class Census:
    """What a process holds between two calls. `values`: live tensors and rows."""

    rss_bytes: int
    files: int
    threads: int
    children: int
    values: int


def census(_: Any = None) -> Census:
    process = psutil.Process()
    with process.oneshot():
        counts = process.num_fds(), process.num_threads(), len(process.children(recursive=True))
        rss_bytes = process.memory_info().rss
    values = sum(isinstance(each, (Rows, torch.Tensor)) for each in gc.get_objects())
    return Census(rss_bytes, *counts, values)


@dataclass
class Watch:
    """Takes a census of the controller and of every worker `CENSUSES` times while a run goes on."""

    pool: Any
    found: list[list[Census]] = field(default_factory=list[list[Census]])

    def during(self, steps: int, folder: Path, action: Callable[[], Run]) -> Run:
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(steps, folder / "metrics.jsonl", ended))
        watcher.start()
        try:
            return action()
        finally:
            ended.set()
            watcher.join()

    def _watch(self, steps: int, lines: Path, ended: threading.Event) -> None:
        """A worker counts between two of its steps: calls wait for each other."""
        while not ended.wait(POLL_S):
            done = lines.read_text().count("\n") if lines.exists() else 0
            if done * CENSUSES >= (len(self.found) + 1) * steps:
                workers = ray.get([actor.__ray_call__.remote(census) for actor in self.pool._workers.actors])
                self.found.append([census(), *workers])


def growth(values: list[float]) -> float:
    """From the first to the last, along the line that fits best."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) * (len(values) - 1)


def settled(watch: Watch) -> list[list[Census]]:
    """Of each process, the censuses after the warm-up."""
    processes = [list(series) for series in zip(*watch.found)]
    return [series[int(WARM_UP * len(series)) :] for series in processes]


def watched(name: str, pins: tuple[str, ...], pool: Pool, folder: Path, steps: int, model: Path) -> Watch:
    graph = hflow.load(GRAPHS / f"{name}.yaml", [f"params.model={model}", f"params.steps={steps}"])
    plan, watch = hflow.compile(graph, "local4", pins), Watch(pool)
    run = watch.during(steps, folder, lambda: execute(plan, folder, pool=pool, export=False))
    assert len(run.metrics) == steps
    return watch


def check(watch: Watch) -> None:
    """Files, threads and processes are as many in the second half of the censuses as in the first; so are
    values, of which a worker keeps none from step to step but its models'."""
    for number, series in enumerate(settled(watch)):
        assert len(series) >= 8, "too few censuses to tell"
        half = len(series) // 2
        for count in ("files", "threads", "children", "values"):
            first, second = (
                max(getattr(each, count) for each in part) for part in (series[:half], series[half:])
            )
            assert second <= first, (number, count, first, second)
        grown = growth([float(each.rss_bytes) for each in series])
        assert grown < MOST_BYTES, (number, "rss_bytes", grown, [each.rss_bytes >> 10 for each in series])


LEAKS = {"files": 1, "threads": 1, "children": 1, "values": 1, "rss_bytes": MOST_BYTES // 10}


@pytest.mark.parametrize("what", LEAKS)
def test_the_check_notices_a_leak(what: str) -> None:
    """One more of something in one process, once in ten censuses; a tenth of the bound in every one."""
    steady = Census(rss_bytes=2**29, files=40, threads=20, children=0, values=99)
    watch = Watch(None, [[steady, steady] for _ in range(40)])
    check(watch)
    for number, row in enumerate(watch.found):
        times = number if what == "rss_bytes" else number // 10
        row[1] = replace(steady, **{what: getattr(steady, what) + times * LEAKS[what]})
    with pytest.raises(AssertionError, match=what):
        check(watch)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_200_steps_of_grpo(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """Weights are resharded into copies and dropped, rows move both ways, in every step as in the last."""
    pins = ("rollout=tp2@0-1", "ref_logprobs=tp1@2", "actor_train=dp2,zero1@0-1")
    check(watched("grpo_tiny", pins, workers, tmp_path / "run", 200, tiny_model))


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_60_steps_of_a_region(workers: Pool, tiny_model: Path, tmp_path: Path) -> None:
    """Several rounds a step, whose rows are collected."""
    pins = ("rollout=dp2@0-1", "actor_train=tp2@2-3")
    check(watched("region", pins, workers, tmp_path / "run", 60, tiny_model))
