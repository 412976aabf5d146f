"""What CUDA needs of this machine beside its devices: a driver that torch fits, a compiler for kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch.cuda import nccl

QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm")
ANSWER_S = 20.0


@dataclass(frozen=True)
class SeenByDriver:
    """One GPU as `nvidia-smi` tells it, whether torch may use it or not; clocks of its processors in MHz,
    None where it does not say."""

    name: str
    driver: str
    clock_mhz: int | None
    max_clock_mhz: int | None


@dataclass(frozen=True)
class Cuda:
    """`seen`: the GPUs that the driver tells of; none without `nvidia-smi`. `version`: of the CUDA that torch
    was built for, None if for none. `nccl`: its version, None where torch has none. `nvcc`: of CUDA's
    compiler, which nothing here needs. `compiler`: the C compiler that Triton would call; `headers`: whether
    Python's are there, which it compiles against. `peers`: ordered pairs of torch's devices of which one
    reaches the other's memory, and all pairs."""

    seen: tuple[SeenByDriver, ...]
    version: str | None
    nccl: str | None
    nvcc: str | None
    compiler: str | None
    headers: bool
    peers: tuple[int, int]


def this_cuda() -> Cuda:
    pairs = list(permutations(range(num_devices()), 2))
    reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    return Cuda(
        _seen(), torch.version.cuda, _nccl(), _nvcc(), _compiler(), _has_headers(), (reached, len(pairs))
    )


def num_devices() -> int:
    """That torch can use: it also counts those that the driver has, however old that is."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _seen() -> tuple[SeenByDriver, ...]:
    told = _answer("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    lines = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
    return tuple(
        SeenByDriver(name, driver, _number(clock), _number(fastest))
        for name, driver, clock, fastest in (line for line in lines if len(line) == len(QUERY))
    )


def _answer(*command: str) -> str:
    """What a program prints; nothing where it is not there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _nccl() -> str | None:
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, nccl.version()))


def _nvcc() -> str | None:
    found = re.search(r"release ([\d.]+)", _answer("nvcc", "--version"))
    return found[1] if found else None


def _compiler() -> str | None:
    """The one that Triton takes (`triton.runtime.build`), if it is there."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


def _has_headers() -> bool:
    """Where Triton looks: Debian's scheme has them in no folder that exists."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    return (Path(folder) / "Python.h").is_file()
