"""The machines a graph is compiled for: device kinds, hosts and links, from ``clusters/*.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class DeviceKind:
    """`flops`: peak FLOP/s of dense matrix products, of which `efficiency` is reached; `memory_bandwidth`:
    bytes/s; `layer_overhead_s`: the least time of one layer's forward pass, however few its tokens."""

    name: str
    platform: Literal["cpu", "cuda"]
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    efficiency: float
    layer_overhead_s: float


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s of one device's transfers in one direction; `latency_s`: per operation."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """`hosts` equal hosts of `devices_per_host` devices; device d is on host d // devices_per_host."""

    name: str
    device: DeviceKind
    hosts: int
    devices_per_host: int
    intra_host: Link
    inter_host: Link

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(range(self.num_devices))

    def host(self, device: int) -> int:
        return device // self.devices_per_host
