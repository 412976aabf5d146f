"""The torch.distributed world that the workers of a plan share, and waits that can be given up.

Devices of a plan are ranks of the world. Every process group is made by all ranks in the same order
and kept; groups are cached by their ranks. A rank that is inside a collective when another dies would
wait for the backend's timeout, so transfers are started asynchronously and polled against an abort flag
that the controller sets.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(minutes=10)
SPIN_S, NAP_S = 2e-4, 1e-4


class Aborted(Exception):  # noqa: N818  (it is what happened)
    """The controller told this worker to give up: another worker failed."""


class World:
    """The present world as `rank` sees it; `close` it before joining the next."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.aborted = threading.Event()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @staticmethod
    def join(store: Store, rank: int, size: int, device: torch.device) -> World:
        """Meet the other ranks at `store`; blocks until all are there."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return World(rank, size, device)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`, in ascending order of ranks. Collective over the whole world when new."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            made = dist.new_group(list(key), timeout=TIMEOUT)
            assert isinstance(made, dist.ProcessGroup) or self.rank not in key
            self._groups[key] = made  # pyright: ignore[reportArgumentType]
        return self._groups[key]

    def exchange(self, sends: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[Tensor]:
        """Uneven all-to-all of 1-D tensors of one dtype and device.

        Args:
            sends: what goes to each rank of the group.
            sizes: how many elements come from each rank.

        Returns:
            What came from each rank: views of one buffer.

        Raises:
            Aborted: when the controller gave the step up meanwhile.
        """
        incoming = sends[0].new_empty(sum(sizes))
        work = dist.all_to_all_single(
            incoming, torch.cat(sends), sizes, [len(t) for t in sends], group=group, async_op=True
        )
        self.wait(work)
        return list(incoming.split(sizes))

    def wait(self, work: dist.Work | None) -> None:
        assert work is not None
        started = time.perf_counter()
        while not work.is_completed():
            if self.aborted.is_set():
                raise Aborted
            if time.perf_counter() - started > SPIN_S:
                time.sleep(NAP_S)
        work.wait()

    def close(self) -> None:
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
