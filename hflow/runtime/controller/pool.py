"""The workers, seen from the controller: call all, gather from all, name the root cause if one fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.worker.failure import Failure

WAIT_S = 60.0
WorkerReport = dict[str, Any]
WorkerCall = tuple[Any, ...]  # a worker method's name and its arguments


class Pool(Protocol):
    """A set of workers that runs one plan after another."""

    def form(self, size: int, wait_s: float = WAIT_S) -> list[str]:
        """Make a new world of the first `size` workers; the node that each rank lies on. Raises HflowError
        HF404 if there are fewer, also after `wait_s` in which more could come."""
        ...

    def call(self, method: str, *arguments: Any) -> list[WorkerReport]:
        """Call a worker method on every rank of the world and return the reports in rank order.

        Raises:
            WorkerFailure: as soon as one rank fails; the others have been told to give up.
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

    def where(self) -> str:
        """The node that rank 0 runs now, or an empty text."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


class WorkerFailure(HflowError):  # noqa: N818  (it is what happened, told as the user's error)
    """A worker's failure by its root cause; `trace` is the worker's traceback for the run's log."""

    def __init__(self, diagnostic: Diagnostic, trace: str = ""):
        super().__init__(diagnostic)
        self.trace = trace


def root_cause(reports: Sequence[WorkerReport]) -> WorkerFailure:
    """The failure that came first and is no consequence of another worker's.

    A node's own error counts before a dead process, and that before broken transfers: a rank whose
    peer vanished only reports the closed connection.
    """
    failed: list[tuple[int, Failure]] = [(i, r["error"]) for i, r in enumerate(reports) if "error" in r]
    rank, failure = min(failed, key=lambda item: (_echo(item[1]), item[1].time))
    where = f"node `{failure.node}` failed" if failure.node else "failed"
    message = f"{where} on worker {rank}: {failure.diagnostic.message}"
    return WorkerFailure(replace(failure.diagnostic, message=message), failure.trace)


def _echo(failure: Failure) -> int:
    if failure.aborted:
        return 3
    if failure.diagnostic.code == "HF402":
        return 1
    connection = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
    return 2 if any(text in failure.diagnostic.message for text in connection) else 0
