"""How this process reaches others over the network."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

from hflow.runtime.machine import machine

STACK = Path("/proc/self/ns/net")  # as an inode, a number of its own for each network namespace of a machine
INTERFACE = "GLOO_SOCKET_IFNAME"  # in the environment: the one by which this process reaches others
ANY_PORT = 9  # nothing is sent to it


def source_address(host: str) -> str:
    """The address that this process has for somebody at `host`, by the system's routes. OSError if none."""
    family, kind, protocol, _, there = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: looks for a route, and sends nothing
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface that has an address, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if any(a.address == address for a in has)), None)


def own_address(interface: str) -> str:
    """The first address of an interface, of the version that most have. OSError if it has none."""
    has = psutil.net_if_addrs().get(interface, [])
    found = [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in has if a.family == family]
    if not found:
        raise OSError(f"the network interface {interface} has no address")
    return found[0]


def is_loopback(address: str) -> bool:
    """Whether an address is one that everybody finds with himself. A name is none."""
    with suppress(ValueError):
        return ip_address(address).is_loopback
    return False


def network_stack() -> str:
    """The same for two processes if they share a loopback: those of one machine, and one container of it."""
    return f"{machine()} {STACK.stat().st_ino if STACK.exists() else 0}"
