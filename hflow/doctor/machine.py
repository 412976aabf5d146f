"""What there is: versions, devices, memory, and whether processes can talk to each other."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

import hflow
from hflow.doctor.cuda import Cuda, num_devices, this_cuda
from hflow.runtime.engines.megatron.cpu_kernels.library import SWITCH, NotBuiltError, built

PACKAGES = ("torch", "megatron-core", "ray", "sglang", "transformers")


@dataclass(frozen=True)
class Device:
    """One that torch may use. `capability`: as ``9.0``."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """`versions` by name, None for what is not installed; `cores` are those that this process may use;
    `open_files`: how many a process may have open, at most. `shared_bytes`: of /dev/shm, None where there is
    none. `loopback`: whether a port can be opened there, and reached. `cpu_kernels`: why hflow's kernels for
    CPUs cannot be compiled here, empty where they can."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    free_bytes: int
    shared_bytes: int | None
    open_files: int
    loopback: bool
    cpu_kernels: str
    cuda: Cuda


def this_machine() -> Machine:
    memory = psutil.virtual_memory()
    own = {"hflow": hflow.__version__, "python": platform.python_version()}
    return Machine(
        own | {name: _version(name) for name in PACKAGES},
        tuple(_device(index) for index in range(num_devices())),
        len(os.sched_getaffinity(0)),
        memory.total,
        memory.available,
        _shared_bytes(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        _reaches_itself(),
        _no_kernels(),
        this_cuda(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device(found.name, found.total_memory, f"{found.major}.{found.minor}")


def _no_kernels() -> str:
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    try:
        built()
    except NotBuiltError as error:
        return str(error)
    return ""


def _shared_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _reaches_itself() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True
