"""The machines a graph is compiled for: device kinds, hosts and links, from ``clusters/*.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hflow.plan.cached_hash import CachedHash
from hflow.plan.engine_registry import DEFAULT_ENGINE, EngineChoice
from hflow.plan.techniques import NO_TECHNIQUES, Techniques


@dataclass(frozen=True)
class Calibration:
    """Shares of a device's peak rates that are reached, by kind of work; each > 0 and <= 1.

    The first three are shares of `DeviceKind.flops`: of training, of a forward pass over whole sequences,
    and of reading a prompt into the KV cache. Decoding is bound by memory: its share is of
    `DeviceKind.memory_bandwidth`. Its products, of one token of each row, reach `decode_efficiency` of the
    FLOP/s; where that is None, as much as those of prompts. All passes read the weights meanwhile; where
    `weights_efficiency` is given, before, at that share of the memory bandwidth. The defaults suit large
    models on GPUs.
    """

    train_efficiency: float = 0.5
    score_efficiency: float = 0.5
    prefill_efficiency: float = 0.5
    decode_bandwidth_efficiency: float = 0.75
    decode_efficiency: float | None = None
    weights_efficiency: float | None = None


@dataclass(frozen=True)
class DeviceKind:
    """`flops`: peak FLOP/s of dense matrix products, in bf16 on ``cuda`` and f32 on ``cpu``, of which
    `efficiency` is reached unless `calibration` says more; `bf16_flops`: on ``cpu`` those in bf16, of which
    the same shares are reached (None: as many as in f32); `memory_bandwidth`: peak bytes/s;
    `layer_overhead_s`: the least time of one layer's forward pass, however few its tokens; of a pass over
    whole rows `score_layer_overhead_s`, and forward and backward `train_layer_overhead_s`, where these are
    known;
    `kernel_latency_s`: the least time of one kernel; `reserve_bytes`: memory that no plan may fill, since an
    allocator leaves gaps; `overhead_bytes`: what is taken before any model is there, by the CUDA context and
    by buffers of NCCL."""

    name: str
    platform: Literal["cpu", "cuda"]
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    efficiency: float
    layer_overhead_s: float
    kernel_latency_s: float = 0.0
    calibration: Calibration = Calibration()
    reserve_bytes: int = 0
    overhead_bytes: int = 0
    score_layer_overhead_s: float | None = None
    train_layer_overhead_s: float | None = None
    bf16_flops: float | None = None

    @property
    def usable_bytes(self) -> int:
        """Memory that plans may fill."""
        return self.memory_bytes - self.reserve_bytes - self.overhead_bytes


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s in one direction; `latency_s`: per operation."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class HostGroup:
    """`hosts` equal hosts of `devices_per_host` devices of one kind."""

    device: DeviceKind
    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host


@dataclass(frozen=True)
class Cluster(CachedHash):
    """Equal hosts, numbered in order, their devices likewise; in a mixed cluster those of `more` follow.

    `intra_host` is the link of one device inside its host, `inter_host` that of one NIC, of which a host
    has `nics_per_host`; `host_link` joins one device with its host's memory (None: nothing can be moved
    there), of which it has `host_memory_bytes` (None: nobody has said). `generate_engine` runs its generate
    nodes unless the user says otherwise; a server takes `server_bytes` of a device beside weights, KV cache
    and what it computes with: its CUDA context and CUDA graphs, also while it sleeps. `token_step_s`: what
    the host of an engine takes of each token step, while no kernel runs. `wake`: how a server that slept
    takes new weights in, at so many bytes/s of the whole model after its latency; None: as soon as they are
    on its devices. `whole_rows`: trainers pass each row whole through their models, as others than hflow's
    do: a prompt again with each of its samples, and logits of prompts too. `techniques`: what engines are
    taken to do beyond what they do today; no cluster file says so, and no plan that is run has any.
    """

    name: str
    device: DeviceKind
    hosts: int
    devices_per_host: int
    intra_host: Link
    inter_host: Link
    host_link: Link | None = None
    nics_per_host: int = 1
    more: tuple[HostGroup, ...] = ()
    generate_engine: EngineChoice = DEFAULT_ENGINE
    host_memory_bytes: int | None = None
    server_bytes: int = 0
    token_step_s: float = 0.0
    wake: Link | None = None
    whole_rows: bool = False
    techniques: Techniques = NO_TECHNIQUES

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.device, self.hosts, self.devices_per_host, self.more))

    __hash__ = CachedHash.__hash__  # a dataclass would make another

    @property
    def groups(self) -> tuple[HostGroup, ...]:
        """All hosts, those of one kind together."""
        return HostGroup(self.device, self.hosts, self.devices_per_host), *self.more

    @cached_property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(range(self.num_devices))

    def host(self, device: int) -> int:
        if not self.more:  # asked for every copy of every edge
            return device // self.devices_per_host
        group, first_host, first_device = self._place(device)
        return first_host + (device - first_device) // group.devices_per_host

    def is_even(self, devices: Sequence[int]) -> bool:
        """Whether hosts have equally many of `devices`, one host after the other."""
        hosts = [self.host(device) for device in devices]
        order = list(dict.fromkeys(hosts))
        return hosts == [host for host in order for _ in range(len(hosts) // len(order))]

    def kind(self, device: int) -> DeviceKind:
        return self._place(device)[0].device if self.more else self.device

    def _place(self, device: int) -> tuple[HostGroup, int, int]:
        """The group of `device`, and the numbers of the group's first host and device."""
        return next(place for place in self._places() if device < place[2] + place[0].num_devices)

    def _places(self) -> Iterator[tuple[HostGroup, int, int]]:
        host = device = 0
        for group in self.groups:
            yield group, host, device
            host, device = host + group.hosts, device + group.num_devices
