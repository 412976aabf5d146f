"""The workers, seen from the controller: call all, gather from all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from hflow.diagnostics import HflowError
from hflow.runtime.controller.watch import Watch
from hflow.runtime.controller.worker_failure import WorkerReport

WAIT_S = 60.0
WorkerCall = tuple[Any, ...]  # a worker method's name and its arguments


class DevicesMissing(HflowError):  # noqa: N818  (as `WorkerFailure`)
    """HF404: there are fewer devices than the plan has."""


class Pool(Protocol):
    """A set of workers that runs one plan after another."""

    def form(self, size: int, wait_s: float = WAIT_S) -> list[str]:
        """Make a new world of the first `size` workers; the node that each rank lies on. Raises
        DevicesMissing if there are fewer, also after `wait_s` in which more could come."""
        ...

    def call(self, method: str, *arguments: Any) -> list[WorkerReport]:
        """Call a worker method on every rank of the world and return the reports in rank order.

        Raises:
            WorkerFailure: as soon as one rank fails or hangs; the others have been told to give up.
        """
        ...

    def stream(self, calls: Iterable[WorkerCall]) -> Iterator[list[WorkerReport]]:
        """Like `call` for one after another, yielding the reports of each in order. Every worker may have
        the next call before all have ended the last, so that no worker waits for the controller, nor for
        workers that it exchanges nothing with."""
        ...

    def renew(self, hosts: Sequence[int]) -> None:
        """Have other workers for the next `form`, so many on each host: some of these have died."""
        ...

    def rooms(self) -> Sequence[int]:
        """How many workers each node that is there holds, with those that it has."""
        ...

    def has_room(self, hosts: Sequence[int]) -> bool:
        """Whether the nodes that are there hold so many workers for each host."""
        ...

    def watch(self, watch: Watch | None) -> None:
        """From now on tell `watch` what workers do, and fail when it finds that some hang; None: wait for
        ever."""
        ...

    def where(self) -> str:
        """The node that rank 0 runs now, or an empty text."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...
