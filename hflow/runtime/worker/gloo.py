"""gloo with one thread for all connections of a process.

torch makes each process group a loop of its own, which wakes up a hundred times a second though nobody sends
anything: ten groups took 3 % of a core, 43 took 9 %.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

GLOO = "hflow_gloo"
THREADS = 2  # of a group's collectives, as torch has


@cache
def register() -> str:
    """Make the backend known to torch. Returns its name."""
    dist.Backend.register_backend(GLOO, _made, extended_api=True, devices=["cpu"])
    return GLOO


def _made(options: Any, _: Any) -> ProcessGroupGloo:
    own: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    own._devices, own._timeout, own._threads = [_loop()], options.timeout, THREADS
    return ProcessGroupGloo(options.store, options.group_rank, options.group_size, own)


@cache
def _loop() -> Any:
    """Listens on the interface that the environment names, as torch's own."""
    return ProcessGroupGloo.create_default_device()
