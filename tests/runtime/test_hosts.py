"""Plans over several hosts: two Ray nodes on this machine, joined from the command line."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import hflow
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute

pytestmark = pytest.mark.slow
GRAPH = Path(__file__).parent / "grpo_small.yaml"
SEES_NONE = f"{Path(__file__).parent / 'rewards.py'}:digits_without_gpus"
STEPS = 3
START_S, RUN_S = 90, 200
PINS = ("rollout=dp4@0-3", "ref_logprobs=tp2,dp2@0-3", "actor_train=tp2,dp2@0-3")


@dataclass
class RayNodes:
    """Two Ray nodes with two CPUs each: where the head listens, and the environment to reach it."""

    address: str
    settings: dict[str, str]
    folder: Path
    second: subprocess.Popen[bytes]

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        """``hflow exec`` on these nodes."""
        return start([*arguments, "--address", self.address], self.settings)

    def restart_second(self) -> None:
        """After it has been killed."""
        self.second.wait()
        self.second = start_node((f"--address={self.address}",), self.settings, self.folder / "again.log")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Where there may be several nodes, Ray's listeners are open to other machines: they ask for a token."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        settings = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        try:
            for role in (head, (f"--address=127.0.0.1:{port}",)):
                started.append(start_node(role, settings, Path(folder) / f"node{len(started)}.log"))
            found = RayNodes(f"127.0.0.1:{port}", settings, Path(folder), started[1])
            yield found
            started[1] = found.second
        finally:
            for node in reversed(started):
                end(node)


def start_node(role: tuple[str, ...], settings: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    ray = Path(sys.executable).parent / "ray"
    command = [str(ray), "start", "--block", "--num-cpus=2", "--disable-usage-stats", *role]
    with log.open("w") as out:
        node = subprocess.Popen(command, env=settings, stdout=out, stderr=out)
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return node


def end(node: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(node.pid).children(recursive=True)
    node.terminate()
    node.wait(30)
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        process.kill()


def start(arguments: list[str], settings: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hflow.cli.app", "exec", *arguments]
    return subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """What the run told."""
    _, told = process.communicate(timeout=RUN_S)
    assert process.returncode == code and "Traceback" not in told, told
    return told


def arguments(
    model: Path, folder: Path, name: str, hosts: int, per_host: int, steps: int = STEPS
) -> list[str]:
    """A data-parallel run on a cluster of `hosts`, into `folder/name`."""
    devices = hosts * per_host
    settings = ("--set", f"params.model={model}", "--set", f"params.steps={steps}")
    settings += ("--set", f"nodes.reward.fn={SEES_NONE}")
    cluster = str(cluster_file(folder, hosts, per_host))
    placed = ("--cluster", cluster, "--pin", f"actor_train=dp{devices}@0-{devices - 1}")
    return [str(GRAPH), *settings, *placed, "--run-dir", str(folder / name)]


def cluster_file(folder: Path, hosts: int, per_host: int) -> Path:
    """That of local4, in several hosts."""
    text = re.sub(r"(?m)^hosts: .*$", f"hosts: {hosts}", Path("clusters/local4.yaml").read_text())
    path = folder / f"hosts{hosts}x{per_host}.yaml"
    path.write_text(re.sub(r"(?m)^devices_per_host: .*$", f"devices_per_host: {per_host}", text))
    return path


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_hosts_of_the_plan_are_nodes(
    nodes: RayNodes, workers: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """Every rank lies on its host's node, and the trajectory is that of one host."""
    graph = hflow.load(GRAPH, [f"params.model={tiny_model}", f"params.steps={STEPS}"])
    plan = hflow.compile(graph, cluster_file(tmp_path, 2, 2), PINS)
    plan.save(tmp_path / "plan.json")
    finish(nodes.start([str(tmp_path / "plan.json"), "--run-dir", str(tmp_path / "run")]))
    [placed] = [e["nodes"] for e in lines(tmp_path / "run", "events.jsonl") if e["event"] == "placed"]
    assert placed[0] == placed[1] != placed[2] == placed[3]
    assert [plan.cluster.host(rank) for rank in range(4)] == [0, 0, 1, 1]
    one_host = hflow.compile(graph, "clusters/local4.yaml", PINS)
    expected = execute(one_host, tmp_path / "one", pool=workers, export=False).metrics
    for ours, theirs in zip(lines(tmp_path / "run", "metrics.jsonl"), expected, strict=True):
        assert ours["digest.rollout"] == theirs["digest.rollout"]
        assert ours["loss.actor_train"] == pytest.approx(theirs["loss.actor_train"], rel=1e-5, abs=1e-7)


def test_what_never_fits_is_told_at_once(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    told = finish(nodes.start(arguments(tiny_model, tmp_path, "run", 2, 4)), 1)
    needs = "the plan needs 2 hosts with 4 CPU each; the Ray cluster has 2 nodes with 2 CPU each"
    assert f"error[HF404]: {needs}" in told and "waiting" not in told


@pytest.mark.rotating(6)
def test_what_is_busy_is_waited_for(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    """A second run starts when the first one ends."""
    first = nodes.start(arguments(tiny_model, tmp_path, "first", 2, 2, steps=5000))
    assert first.stderr and next(line for line in first.stderr if line.startswith("step"))
    second = nodes.start(arguments(tiny_model, tmp_path, "second", 2, 1))
    assert second.stderr
    told = next(line for line in second.stderr if line.startswith("waiting"))
    assert "2 hosts with 1 CPU each: the Ray cluster has 2 nodes with 2 CPU each, 0 CPU free" in told
    first.terminate()
    finish(first, 143)
    finish(second)


@pytest.mark.rotating(6)
def test_hosts_may_share_a_machine(tiny_model: Path, tmp_path: Path) -> None:
    """A plan of two hosts, tried on one: it runs, and says so."""
    told = finish(start(arguments(tiny_model, tmp_path, "run", 2, 1)))
    assert (
        "the plan is for 2 hosts with 1 CPU each; the Ray cluster has 1 node with 2 CPU: hosts will" in told
    )


@pytest.mark.parametrize(
    ("hosts", "nodes", "apart", "together"),
    [
        ((2, 2), (2, 2), True, True),
        ((2, 4), (4, 2), True, True),  # each host finds a node of its size
        ((2, 2), (4,), False, True),
        ((4, 2, 2), (4, 4), False, True),
        ((3, 3, 2), (4, 4), False, False),  # enough in all, but beside a 3 there is no room for 2
        ((4,), (2, 2), False, False),  # a host is not split
    ],
)
def test_where_hosts_fit(
    workers: Pool, hosts: tuple[int, ...], nodes: tuple[int, ...], apart: bool, together: bool
) -> None:
    from hflow.runtime.controller.placement import Demand, packs, spreads

    has = [{"CPU": float(cpus), "GPU": 1.0} for cpus in nodes]
    assert (spreads(Demand(hosts, "cpu"), has), packs(Demand(hosts, "cpu"), has)) == (apart, together)
    on_gpus = Demand((2,), "cuda")
    assert not packs(on_gpus, has) and on_gpus.text(has[:1], "node").startswith("1 node with 1 GPU and ")
