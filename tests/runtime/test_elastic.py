"""A run whose devices are lost goes on with those that are left, and with all when they are back."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hflow
from hflow.plan.cluster_file import load_cluster
from hflow.runtime.controller.elastic import smaller_clusters
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from tests.runtime.test_hosts import GRAPH, RayNodes, arguments, nodes

__all__ = ["nodes"]  # the fixture
KEPT = ("checkpoint.every=1", "restarts=5", "elastic=true", "wait=3")
LIMIT_S = 240


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 49))
def test_smaller_clusters(hosts: int, devices: int, rooms: list[int], below: int) -> None:
    """Each can be placed on what is left, none is too large, the largest is the largest there is."""
    whole = replace(load_cluster("local4"), hosts=hosts, devices_per_host=devices)
    found = list(smaller_clusters(whole, rooms, below))
    shapes = [(c.hosts, c.devices_per_host) for c in found]
    assert len(set(shapes)) == len(shapes) and all(c.num_devices < below for c in found)
    for number, each in shapes:
        assert number <= hosts and each <= devices
        assert sum(room >= each for room in rooms) >= number
    sizes = [c.num_devices for c in found]
    assert sizes == sorted(sizes, reverse=True)
    every = [(h, d) for h in range(1, hosts + 1) for d in range(1, devices + 1)]
    fit = [h * d for h, d in every if sum(r >= d for r in rooms) >= h and h * d < below]
    assert sorted(fit, reverse=True) == sizes


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(
    nodes: RayNodes, workers: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """4 workers on two nodes, then 2 on one, then 4 again: the tokens are those of an undisturbed run."""
    run = tmp_path / "run"
    kept = [text for key in KEPT for text in ("--set", f"run.{key}")]
    process = nodes.start([*arguments(tiny_model, tmp_path, "run", 2, 2, steps=4000), *kept])
    try:
        await_event(process, run, lambda e: e["event"] == "checkpoint" and e["step"] >= 2)
        placed = next(e for e in events(run) if e["event"] == "placed")
        kill_node(nodes.second)
        await_event(process, run, lambda e: e["event"] == "replanned")
        shrunk = len(events(run))
        await_event(process, run, lambda e: e["event"] == "checkpoint", shrunk)
        assert len(json.loads((run / "plan.json").read_text())["cluster"]) and workers_of(run) == 2
        nodes.restart_second()
        await_event(process, run, lambda e: e["event"] == "growing", shrunk)
        grown = len(events(run))
        await_event(process, run, lambda e: e["event"] == "checkpoint", grown)
        assert workers_of(run) == len(placed["nodes"]) == 4
    finally:
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 130 and "Traceback" not in told, told
    assert "1 x 2 of" in told and "lost devices are back" in told
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(len(metrics)))
    graph = hflow.load(GRAPH, [f"params.model={tiny_model}", f"params.steps={len(metrics)}"])
    undisturbed = execute(hflow.compile(graph, "local4"), tmp_path / "one", pool=workers, export=False)
    for ours, theirs in zip(metrics, undisturbed.metrics, strict=True):
        assert ours["digest.rollout"] == theirs["digest.rollout"]
        assert ours["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5, abs=1e-7)


def events(run: Path) -> list[dict[str, Any]]:
    """Those of the run, without what each worker did."""
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] != "ran"]


def workers_of(run: Path) -> int:
    return len([e for e in events(run) if e["event"] == "placed"][-1]["nodes"])


def await_event(
    process: subprocess.Popen[str], run: Path, found: Callable[[dict[str, Any]], bool], after: int = 0
) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (run / "events.jsonl").is_file() or not any(map(found, events(run)[after:])):
        assert process.poll() is None and process.stderr, process.communicate()
        assert time.monotonic() < deadline, events(run)[-5:]
        time.sleep(0.3)


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """As when its machine fails: nothing of it is asked to end."""
    family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=10)
