"""Hosts that are apart, on one machine: each has network, mount, process, IPC and name namespaces of its own.

What real hosts share is shared here: a network (a bridge with a veth pair to each host), and the folders that
are named. Nothing else is: each has its own loopback, ``/tmp``, ``/dev/shm`` and numbers of processes. Two
traps of real machines are there, too: ``/etc/hosts`` gives the host's own name an address of loopback, as
Debian does, and one interface has the same address on every host, as Docker's bridge has.

Everything lives in namespaces, the bridge too, so nothing is left when their processes have ended. These read
from a pipe: when the process that made them ends in any way, they do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil

PREFIX = "10.77.0"
GATEWAY = f"{PREFIX}.254"  # nobody is there; but a host without a route to the world is a rare one
DECOY = "172.17.0.1"  # of Docker's bridge, on every host
REPOSITORY = Path(__file__).parents[2]
START_S = 30.0

NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child=KILL")

# Arguments: the host's name, the lines of its /etc/hosts, and the folders that it shares. These stay where
# they are, also below /tmp.
INIT = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
for folder in "${@:3}"; do
  mkdir -p "/dev/shm/kept$folder"
  mount --rbind "$folder" "/dev/shm/kept$folder"
done
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp /dev/shm
for folder in "${@:3}"; do
  mkdir -p "$folder"
  mount --move "/dev/shm/kept$folder" "$folder"
done
rm -rf /dev/shm/kept
printf '%s\\n' "$2" > /tmp/names
mount --bind /tmp/names /etc/hosts
ip link set lo up
ip link add docker0 type bridge
ip address add %DECOY%/16 dev docker0
ip link set docker0 up
echo ready
read -r _ || true
""".replace("%DECOY%", DECOY)


class Host:
    """One of them. `address`: of its interface `eth0`, the only one that leads to the others."""

    def __init__(self, number: int, count: int, switch: int, shared: Sequence[Path]):
        self.address, self.name = f"{PREFIX}.{number}", f"host{number}"
        self._switch, self._port = switch, f"port{number}"
        kept = [str(folder) for folder in _outermost(shared) if folder.is_relative_to("/tmp")]
        self._root = _started(
            ["unshare", *NAMESPACES, "bash", "-c", INIT, "init", self.name, _names(number, count), *kept]
        )
        [init] = psutil.Process(self._root.pid).children()
        self._inside = ("nsenter", f"--target={init.pid}", "--all")
        self._on_switch(
            "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid)
        )
        self._on_switch("link", "set", self._port, "master", "switch", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", GATEWAY)

    def start(
        self, *command: str, settings: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A command on this host, in the repository's folder. The process is outside; its child is inside."""
        # A process group of its own: to those of the host, that of a process outside has the number 0, and a
        # signal to it would come here.
        inside = [*self._inside, "setsid", "env", "-C", str(REPOSITORY), *command]
        environment = None if settings is None else dict(settings)
        return subprocess.Popen(inside, env=environment, text=True, **options)

    def run(self, *command: str) -> str:
        """What it printed. Raises CalledProcessError."""
        return subprocess.run([*self._inside, *command], capture_output=True, text=True, check=True).stdout

    def cut(self) -> None:
        """Nothing goes to the other hosts or comes from them, and neither end is told."""
        self._on_switch("link", "set", self._port, "nomaster")

    def mend(self) -> None:
        self._on_switch("link", "set", self._port, "master", "switch")

    def limit(self, megabits: float) -> None:
        """What goes out and what comes in, each at such a rate."""
        shape = ("root", "tbf", "rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "200ms")
        _run(*self._inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        _run(*_of_network(self._switch), "tc", "qdisc", "replace", "dev", self._port, *shape)

    def sent_bytes(self) -> int:
        """To other hosts, since it was made."""
        [link] = json.loads(self.run("ip", "-json", "-statistics", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def kill(self) -> None:
        """All of its processes, at once. Twice is once."""
        self._root.kill()
        self._root.wait()

    def _on_switch(self, *arguments: str) -> None:
        _run(*_of_network(self._switch), "ip", *arguments)


@contextmanager
def hosts_apart(count: int, shared: Sequence[Path]) -> Iterator[list[Host]]:
    """Hosts that find at least the folders `shared` where they are here."""
    needed = [*shared, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    made: list[Host] = []
    network = "ip link add switch type bridge && ip link set switch up && echo ready && read -r _ || true"
    switch = _started(["unshare", "--net", "bash", "-c", network])
    try:
        for number in range(1, count + 1):
            made.append(Host(number, count, switch.pid, needed))
        yield made
    finally:
        for host in made:
            host.kill()
        switch.kill()
        switch.wait()


@cache
def why_not() -> str:
    """What stands in the way of such hosts here, or an empty text."""
    if os.geteuid() != 0:
        return "hosts of their own need root, to make namespaces"
    try:
        with hosts_apart(1, ()) as [host]:
            host.limit(100)
    except FileNotFoundError as error:
        return f"hosts of their own need `{error.filename}`"
    except (subprocess.CalledProcessError, AssertionError) as error:
        told = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        return f"this system makes no hosts of their own: {str(told).strip()}"
    return ""


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Those that lie in none of the others."""
    return [folder for folder in dict.fromkeys(folders) if not {*folder.parents} & {*folders}]


def _names(own: int, count: int) -> str:
    """What a host's ``/etc/hosts`` says: its own name has an address of loopback."""
    others = (f"{PREFIX}.{number} host{number}" for number in range(1, count + 1) if number != own)
    return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 host{own}", *others])


def _of_network(pid: int) -> tuple[str, ...]:
    return "nsenter", f"--target={pid}", "--net"


def _started(command: list[str]) -> subprocess.Popen[str]:
    """A process that says when it is ready, and ends when its input does."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout and process.stderr
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise AssertionError(process.stderr.read())
    return process


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
