"""What a process takes for its own host, where one machine holds several that are apart."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hflow.runtime.machine import machine
from hflow.runtime.network import network_stack
from tests.runtime.hosts import Host, hosts_apart, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]

TELL = """
import json, os, torch
from hflow.runtime.machine import machine
from hflow.runtime.network import interface_of, network_stack, source_address
token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
route = source_address(OTHER)
told = dict(one=[os.getpid(), token.data_ptr(), *token.tolist()], machine=machine(), stack=network_stack())
print(json.dumps(told | dict(route=route, interface=interface_of(route))), flush=True)
input()
"""
LOOK = (
    "import sys; from hflow.runtime.worker.cross_memory import _finds; print(_finds(*map(int, sys.argv[1:])))"
)


LISTEN = """
import json, os, psutil
from hflow.runtime.network import INTERFACE
from hflow.runtime.worker.gloo import _loop
os.environ[INTERFACE] = "eth0"
_loop()
sockets = psutil.Process().net_connections()
print(json.dumps([socket.laddr.ip for socket in sockets if socket.status == "LISTEN"]), flush=True)
"""


def start(host: Host, code: str) -> tuple[subprocess.Popen[str], Any]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = host.start(sys.executable, "-c", code, **pipes)
    assert process.stdout
    return process, json.loads(process.stdout.readline())


def finds(host: Host, one: list[int]) -> bool:
    with host.start(sys.executable, "-c", LOOK, *map(str, one), stdout=subprocess.PIPE) as process:
        return {"True\n": True, "False\n": False}[process.communicate(timeout=60)[0]]


def test_memory_of_another_hosts_process_is_not_read() -> None:
    """Not even where a process of the reader's host has its number."""
    with hosts_apart(2, ()) as [first, second]:
        second.run("bash", "-c", "echo 1000 > /proc/sys/kernel/ns_last_pid")  # free elsewhere
        process, told = start(second, TELL.replace("OTHER", repr(first.address)))
        pid, *_ = told["one"]
        make = f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid; sleep 60 &> /dev/null & echo $!"
        assert first.run("bash", "-c", make) == f"{pid}\n"
        assert finds(second, told["one"]) and not finds(first, told["one"])
        assert told["machine"] == machine() and told["stack"] != network_stack()
        assert (told["route"], told["interface"]) == (second.address, "eth0")
        process.communicate("\n", timeout=60)


def test_gloo_listens_on_the_interface_that_is_named() -> None:
    """And not where the host's name leads."""
    with hosts_apart(1, ()) as [host]:
        process, addresses = start(host, LISTEN)
        assert addresses == [host.address]
        process.communicate(timeout=60)
