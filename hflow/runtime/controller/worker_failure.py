"""What workers report, and of several that fail the root cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.worker.failure import Failure

WorkerReport = dict[str, Any]


class WorkerFailure(HflowError):  # noqa: N818  (it is what happened, told as the user's error)
    """A worker's failure by its root cause; `trace` is the worker's traceback for the run's log."""

    def __init__(self, diagnostic: Diagnostic, trace: str = ""):
        super().__init__(diagnostic)
        self.trace = trace


def root_cause(reports: Sequence[WorkerReport], addresses: Sequence[str] = ()) -> WorkerFailure:
    """The failure that came first and is no consequence of another worker's.

    A node's own error counts before a dead process, and that before broken transfers: a rank whose
    peer vanished only reports the closed connection.

    Args:
        addresses: of the hosts of all ranks, where there are several.
    """
    failed: list[tuple[int, Failure]] = [(i, r["error"]) for i, r in enumerate(reports) if "error" in r]
    rank, failure = min(failed, key=lambda item: (_echo(item[1]), item[1].time))
    where = f"node `{failure.node}` failed" if failure.node else "failed"
    host = f" at {addresses[rank]}" if addresses else ""
    message = f"{where} on worker {rank}{host}: {failure.diagnostic.message}"
    return WorkerFailure(replace(failure.diagnostic, message=message), failure.trace)


def _echo(failure: Failure) -> int:
    if failure.aborted:
        return 3
    if failure.diagnostic.code == "HF402":
        return 1
    connection = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
    return 2 if any(text in failure.diagnostic.message for text in connection) else 0
