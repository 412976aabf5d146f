"""One worker in this very process: for breakpoints, notebooks and single-device plans."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.controller.pool import WorkerCall
from hflow.runtime.controller.watch import Watch
from hflow.runtime.controller.worker_failure import WorkerReport, root_cause
from hflow.runtime.worker.worker import Worker


class InlinePool:
    """A call runs in the thread that makes it, so nobody can see whether it hangs: it is never watched."""

    def __init__(self, device: str = "cpu"):
        self.worker = Worker(device)
        self._threads_before = torch.get_num_threads()
        self._generation = 0

    def form(self, size: int, wait_s: float = 0.0) -> list[str]:
        if size != 1:
            message = f"the plan has {size} workers; inline workers are for plans of one"
            raise HflowError(Diagnostic("HF404", message, help="compile for a cluster of one device"))
        self._generation += 1
        _raise_failed(self.worker.join(HashStore(), self._generation, 0, 1))
        return [socket.gethostname()]

    def call(self, method: str, *arguments: Any) -> list[WorkerReport]:
        report = getattr(self.worker, method)(*arguments)
        _raise_failed(report)
        return [report]

    def stream(self, calls: Iterable[WorkerCall]) -> Iterator[list[WorkerReport]]:
        return (self.call(*call) for call in calls)

    def renew(self, hosts: Sequence[int]) -> None:
        self.worker.close()

    def rooms(self) -> Sequence[int]:
        return (1,)

    def has_room(self, hosts: Sequence[int]) -> bool:
        return sum(hosts) == 1

    def watch(self, watch: Watch | None) -> None:
        """Nothing comes of it."""

    def where(self) -> str:
        return self.worker.where()

    def close(self) -> None:
        self.worker.close()
        torch.set_num_threads(self._threads_before)


def _raise_failed(report: WorkerReport) -> None:
    if "error" in report:
        raise root_cause([report])
