"""Joining a Ray cluster that somebody else started: it is used, and left as it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
GRAPH = Path(__file__).parent / "grpo_small.yaml"
# None of the settings of the Ray that other tests run in this process; on loopback only.
SETTINGS = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
SETTINGS["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
SETTINGS["RAY_AUTH_MODE"] = "disabled"  # whatever tokens lie in this user's home


@pytest.fixture
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head node on loopback with one CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).parent / "ray"
    command = [
        str(ray), "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false",
        "--node-ip-address=127.0.0.1", "--disable-usage-stats",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(command, env=SETTINGS, stdout=out, stderr=out)
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        assert head.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    family = psutil.Process(head.pid).children(recursive=True)
    head.terminate()
    head.wait(30)
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        process.kill()


@pytest.mark.rotating(6)
def test_joins_and_leaves_a_cluster(ray_address: str, tiny_model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "hflow.cli.app", "exec", str(GRAPH), "--set", f"params.model={tiny_model}",
        "--set", "params.steps=2", "--cluster", "local1", "--address", ray_address,
    ]  # fmt: skip
    for run in ("first", "second"):  # the second finds the CPU free again
        done = subprocess.run(
            [*command, "--run-dir", str(tmp_path / run)],
            env=SETTINGS, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (tmp_path / run / "metrics.jsonl").read_text().count("\n") == 2


def test_unreachable_address_is_told(tiny_model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "hflow.cli.app", "exec", str(GRAPH), "--set", f"params.model={tiny_model}",
        "--address", "127.0.0.1:1", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, env=SETTINGS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error[HF404]" in done.stderr and "Traceback" not in done.stderr
