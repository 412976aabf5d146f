"""gloo with one thread for all connections of a process, between ranks that make sure of each other.

torch makes each process group a loop of its own, which wakes up a hundred times a second though nobody sends
anything: ten groups took 3 % of a core, 43 took 9 %.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from hflow.runtime.network import INTERFACE
from hflow.runtime.worker.proof import GroupKey, SignedStore, check_peers

GLOO = "hflow_gloo"
THREADS = 2  # of a group's collectives, as torch has

_secret = b""  # of the present world: torch does not say for which one it wants a group


@cache
def _register() -> None:
    dist.Backend.register_backend(GLOO, _made, extended_api=True, devices=["cpu"])


def register(secret: bytes) -> str:
    """Make the backend known to torch; groups made from now on are of the world with this secret. Returns its
    name."""
    global _secret
    _register()
    _secret = secret
    return GLOO


def _made(options: Any, _: Any) -> ProcessGroupGloo:
    own: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    own._devices, own._timeout, own._threads = [_loop()], options.timeout, THREADS
    key = GroupKey(_secret, options.group_id)
    store = SignedStore(options.store, key)  # asked while the group is made, and never later
    group = ProcessGroupGloo(store, options.group_rank, options.group_size, own)
    check_peers(group, key)
    return group


@cache
def _loop() -> Any:
    """Listens on the interface that the environment names. torch's own default does so only where torch makes
    the group itself; elsewhere it takes what the host's name resolves to, which may be loopback, or none. Not
    lazy, whatever the environment says: all connections of a group are made, and checked, with it."""
    if interface := os.environ.get(INTERFACE):
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return ProcessGroupGloo.create_default_device(lazy_init=False)
