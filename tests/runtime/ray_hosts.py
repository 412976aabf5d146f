"""A Ray cluster with a node on each of several hosts that are apart, as a user starts one."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.runtime.hosts import Host, hosts_apart

START_S, RUN_S = 120, 240
PORT = 6379


@dataclass(frozen=True)
class RayHosts:
    """Hosts with a Ray node of one CPU each, the first one's being the head; `settings`: to reach it."""

    hosts: Sequence[Host]
    folder: Path
    settings: dict[str, str]

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """``hflow exec`` on the first host."""
        command = ("-m", "hflow.cli.app", "exec", *arguments, "--address", f"{self.head.address}:{PORT}")
        return self.head.start(sys.executable, *command, settings=self.settings, stderr=subprocess.PIPE)

    def run(self, *arguments: str) -> str:
        """What a run told that did all."""
        return finish(self.start(*arguments))


def finish(process: subprocess.Popen[str], code: int = 0, limit_s: float = RUN_S) -> str:
    """What a run told that ended with `code`."""
    try:
        _, told = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children():
            child.kill()
        raise AssertionError(f"no end within {limit_s} s: {process.communicate()[1]}") from None
    assert process.returncode == code and "Traceback" not in told, told
    return told


@contextmanager
def ray_hosts(count: int, shared: Path, without_routes: bool = False) -> Iterator[RayHosts]:
    """Hosts that share `shared`, in which this makes a folder. `without_routes`: none to the world."""
    folder = shared / f"hosts-{secrets.token_hex(4)}"
    folder.mkdir()
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "OMP_"))}
    settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with hosts_apart(count, [shared]) as hosts:
        for host in hosts if without_routes else ():
            host.run("ip", "route", "del", "default")
        head, *others = hosts
        logs = [_start_node(head, folder, settings, "--head", f"--port={PORT}", "--include-dashboard=false")]
        _await_nodes(logs)
        join = f"--address={head.address}:{PORT}"
        _await_nodes([_start_node(host, folder, settings, join) for host in others])
        yield RayHosts(hosts, folder, settings)


def _start_node(host: Host, folder: Path, settings: dict[str, str], *role: str) -> Path:
    """The file in which it tells how it goes."""
    log = folder / f"{host.name}.log"
    ray = str(Path(sys.executable).parent / "ray")
    command = (ray, "start", "--block", "--num-cpus=1", "--disable-usage-stats", *role)
    with log.open("w") as out:
        host.start(*command, settings=settings, stdout=out, stderr=out)
    return log


def _await_nodes(logs: Sequence[Path]) -> None:
    deadline = time.monotonic() + START_S
    for log in logs:
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


def cluster_file(folder: Path, hosts: int) -> Path:
    """That of local4, with one device on each of so many hosts."""
    text = re.sub(r"(?m)^hosts: .*$", f"hosts: {hosts}", Path("clusters/local4.yaml").read_text())
    path = folder / f"hosts{hosts}.yaml"
    path.write_text(re.sub(r"(?m)^devices_per_host: .*$", "devices_per_host: 1", text))
    return path
