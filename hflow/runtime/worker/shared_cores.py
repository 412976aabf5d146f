"""Which cores a worker may count on: the workers of a machine share out what they all may use."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from hflow.runtime.cores import Cores, allowed, share_out
from hflow.runtime.machine import machine


def agree(rank: int, size: int) -> dict[int, Cores]:
    """The cores of every rank of this rank's machine: those that may use the same ones share them.
    Collective over the world, which can move memory of hosts."""
    cores = allowed()
    name = hashlib.sha256(f"{machine()} {cores}".encode()).digest()[:8]
    names = torch.empty(size, dtype=torch.int64)
    dist.all_gather(list(names.split(1)), torch.frombuffer(bytearray(name), dtype=torch.int64))
    here = [other for other in range(size) if names[other] == names[rank]]
    return dict(zip(here, share_out(cores, len(here))))
